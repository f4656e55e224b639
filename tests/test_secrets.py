"""What must stay secret, the token and what clients send, is in no log line and no error reply."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemons import Daemon

TOKEN = "sesame-4711-token"
WRONG = "sesame-0815-wrong"
SAID = "tell-nobody"
"""In everything that a client says here, but for session ids that are good ones."""

PARAMS = {"chunk_hashes": ["h-a"]}
DEEP = "[" * 5000 + f'"{SAID}"' + "]" * 5000


def turn_end(**fields: Any) -> dict[str, Any]:
    return {"type": "turn_end", "session_id": "s", "kv_transfer_params": PARAMS, **fields}


REFUSED: list[Any] = [
    SAID,
    [SAID],
    [[SAID]],
    {"type": "x" * 1000 + SAID},
    {"type": {SAID: SAID}},
    {SAID: SAID},
    {"type": "turn_end", "session_id": {SAID: SAID}, "kv_transfer_params": PARAMS},
    {"type": "session_map", "session_id": SAID * 1000},
    {"type": "turn_start", "session_id": "s", "lookup_id": SAID * 1000},
    {"type": "snapshot_restore", "session_id": "s", "source_session_id": SAID * 1000},
    {"type": "session_fork", "session_id": "s", "child_session_id": SAID * 1000},
    {"type": "session_fork_end", "session_id": "s", "fork_id": SAID},
    {"type": "session_fork_end", "session_id": "s", "fork_id": 10**40},
    turn_end(kv_transfer_params=SAID),
    turn_end(kv_transfer_params={SAID: SAID}),
    turn_end(kv_transfer_params={"chunk_hashes": SAID}),
    turn_end(kv_transfer_params={"chunk_hashes": [{SAID: SAID}]}),
    turn_end(kv_transfer_params={"chunk_hashes": [SAID * 1000]}),
    turn_end(kv_transfer_params={"chunk_hashes": [SAID, ""]}),
    turn_end(seq=SAID),
    turn_end(finish_reason={SAID: SAID}),
    turn_end(debug_context=SAID),
    turn_end(debug_context={"messages": SAID}),
    turn_end(debug_context={"messages": {SAID: SAID}}),
    turn_end(debug_context={"timing": SAID}),
    turn_end(debug_context={"timing": {"ttft_ms": SAID}}),
    turn_end(debug_context={"timing": {"ttft_ms": {SAID: SAID}}}),
]

NOT_JSON = [
    SAID,
    f'{{"type": "turn_end", "session_id": "{SAID}',
    f'{{"type": "turn_end" "{SAID}"}}',
    f'{{"type": "turn_end", "session_id": "s"}}{SAID}',
    f'[{{"type": "health"}}, {SAID}]',
    f'{{"type": "turn_end", "session_id": "\\ud800{SAID}", "kv_transfer_params": {{}}}}',
    f'{{"type": "turn_end", "session_id": "s", "seq": 1e999, "x": "{SAID}"}}',
    f'{{"type": "turn_end", "session_id": "s", "debug_context": {{"messages": {DEEP}}}}}',
    f'{{"type": "health", "x": {DEEP}}}',
]

NOT_HTTP = [
    b"POST /event HTTP/1.1\r\nhost: x\r\nauthorization %b\r\n\r\n",
    b"POST /event HTTP/1.1\r\nhost: x\r\nauthorization: Bearer \x01%b\r\n\r\n",
    b"POST /event HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n",
    b"POST /event %b HTTP/1.1\r\nhost: x\r\n\r\n",
    b"%b\r\n\r\n",
    b"POST %b HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /event HTTP/1.1\r\nhost: x\r\ncontent-length: %b\r\n\r\n",
    b"POST /event HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n%b\r\n",
    b"POST /event HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sesame-4711-token\r\n"
    b"transfer-encoding: chunked\r\n\r\n%b\r\n",
    b"POST /event HTTP/9.9\r\nhost: x\r\nx: %b\r\n\r\n",
]


@contextmanager
def daemon_at_debug(folder: Path, script: str | None = None, **more: str) -> Iterator[Daemon]:
    environment = {
        "RAMAKV_LOG__LEVEL": "debug",
        "RAMAKV_AUTH_TOKEN": TOKEN,
        "RAMAKV_TRACE_EVENTS": "true",
        "RAMAKV_DEBUG_ENABLED": "true",
        **more,
    }
    daemon = Daemon(folder, **environment)
    command = ["-c", script] if script else ["-m", "ramakv", "serve"]
    try:
        with daemon.log.open("wb") as log:
            daemon.process = subprocess.Popen(
                [sys.executable, *command], env=daemon.environment, cwd=folder, stderr=log
            )
        daemon.wait_until_answering()
        yield daemon
        assert daemon.stop() == 0
    finally:
        daemon.kill()


def revealed(text: str) -> list[str]:
    return [secret for secret in (TOKEN, WRONG, SAID) if secret in text]


def raw(daemon: Daemon, data: bytes) -> str:
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=30) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(65_536):
            answer += part
    return answer.decode(errors="replace")


def test_no_secret_is_in_the_log_nor_in_an_error_reply(tmp_path: Path) -> None:
    with daemon_at_debug(tmp_path) as daemon, httpx.Client(trust_env=False, timeout=30) as client:
        url = f"{daemon.url}/event"

        def post(body: str | bytes, token: str = TOKEN) -> httpx.Response:
            headers = {"Authorization": f"Bearer {token}"}
            return client.post(url, content=body, headers=headers)

        message = {"role": "user", "content": SAID}
        context = {"messages": [message, SAID, [SAID], {SAID: 1}], "timing": {"ttft_ms": 1.5}}
        assert post(json.dumps(turn_end(debug_context=context))).json()["data"]["debug_written"]
        for event in ("turn_start", "session_map", "session_suspend", "session_close"):
            reply = post(json.dumps({"type": event, "session_id": "s", SAID: SAID}))
            assert reply.json()["ok"], reply.text
        (tmp_path / "debug").rename(tmp_path / "moved")
        (tmp_path / "debug").write_text("a file where the folder should be")
        reply = post(json.dumps(turn_end(session_id="t", debug_context=context)))
        assert reply.json()["data"]["debug_written"] is False

        for body in REFUSED:
            text = json.dumps(body)
            reply = post(text)
            assert reply.json() != {}, text
            assert not revealed(reply.text), (text[:200], reply.text[:300])
            assert len(reply.content) < 1000, text[:200]
        for text in NOT_JSON:
            reply = post(text)
            assert not revealed(reply.text), (text[:200], reply.text[:300])
            assert len(reply.content) < 1000, text[:200]
        reply = post(b'{"type": "health", "x": "\xff' + SAID.encode() + b'"}')
        assert (reply.status_code, revealed(reply.text)) == (400, [])
        reply = post(json.dumps(turn_end(debug_context=context)), token=WRONG)
        assert (reply.status_code, revealed(reply.text)) == (401, [])
        for request in NOT_HTTP:
            for secret in (SAID, WRONG):
                answer = raw(daemon, request % secret.encode())
                assert not revealed(answer), (request, answer)
    log = daemon.log.read_text()
    assert not revealed(log), [line for line in log.splitlines() if revealed(line)]
    assert '"session_id": "s"' in log, "at debug, there is a line for each event"
    assert "debug file not written" in log


FAILING = """
import ramakv.service
async def handle(self, event):
    if event.__struct_config__.tag == "health":
        return await real(self, event)
    token, body = self.config.auth_token, event
    def deeper(event, token):
        raise ZeroDivisionError("by design")
    deeper(body, token)
real = ramakv.service.Service.handle
ramakv.service.Service.handle = handle
import ramakv.cli; ramakv.cli.main(["serve"])
"""


@pytest.mark.parametrize("format_", ["json", "console"])
def test_a_traceback_has_no_values_in_it(tmp_path: Path, format_: str) -> None:
    with daemon_at_debug(tmp_path, FAILING, RAMAKV_LOG__FORMAT=format_) as daemon:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        body = turn_end(debug_context={"messages": [SAID]})
        reply = httpx.post(f"{daemon.url}/event", json=body, headers=headers, trust_env=False)
        assert reply.status_code == 500
        assert not revealed(reply.text)
    log = daemon.log.read_text()
    assert len(re.findall("ZeroDivisionError: by design", log)) == 1
    assert "in deeper" in log
    assert not revealed(log)
