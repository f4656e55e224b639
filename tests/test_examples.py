"""The examples run as they are told to run, offline, against a real daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.daemons import running_daemon

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import model_server  # noqa: E402 - it is no package

CHAT = [{"role": "user", "content": "x" * 200}]


def run_agent(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / "agent.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_agent_reports_its_turns(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon, model_server.serving() as model:
        out = run_agent("--model", model, "--ramakv", daemon.url, "--session", "s")
        assert out.count("\n> ") + 1 == 3
        assert "ramakv knows 5 chunks of this session" in out
        assert daemon.send("health")["data"]["sessions_count"] == 0, "it closed its session"


def test_the_agent_works_as_well_where_no_daemon_is(tmp_path: Path) -> None:
    with model_server.serving() as model:
        out = run_agent("--model", model, "--ramakv", "http://127.0.0.1:9")
    assert "ramakv knows 0 chunks" in out


def test_the_stand_in_reports_prefix_hashes_with_the_last_chunk() -> None:
    def ask(messages: list[dict[str, str]], **fields: Any) -> httpx.Response:
        body = {"messages": messages, **fields}
        return httpx.post(f"{url}/chat/completions", json=body, trust_env=False)

    with model_server.serving() as url:
        whole = ask(CHAT).json()
        lines = ask(CHAT, stream=True).text.split("\n\n")
        longer = ask([*CHAT, {"role": "user", "content": "y" * 200}]).json()
        assert httpx.post(f"{url}/other", json={}, trust_env=False).status_code == 404
    hashes = whole["kv_transfer_params"]["chunk_hashes"]
    assert len(hashes) == 3
    assert longer["kv_transfer_params"]["chunk_hashes"][:3] == hashes
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert chunks[-1]["kv_transfer_params"]["chunk_hashes"] == hashes
    assert not any("kv_transfer_params" in chunk for chunk in chunks[:-1])
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text.strip() == whole["choices"][0]["message"]["content"]
