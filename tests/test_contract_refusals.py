"""What the contract refuses: with which status, in which words, and that it changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.daemons import running_daemon
from tests.test_contract_events import event, turn_end

STATUSES = {200, 400, 401, 404, 405, 409, 413, 503}
"""All that the contract's table has."""

NEED_A_SESSION = [
    "turn_start",
    "turn_end",
    "snapshot_restore",
    "session_map",
    "session_close",
    "session_suspend",
    "session_fork",
    "session_fork_end",
]

PARAMS: dict[str, Any] = {"kv_transfer_params": {"chunk_hashes": ["a"]}}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a daemon that all tests of this file share: what they send changes nothing."""
    folder = tmp_path_factory.mktemp("daemon")
    with (
        running_daemon(folder, RAMAKV_BACKEND__KIND="noop") as process,
        httpx.Client(base_url=process.url, trust_env=False, timeout=10) as http,
    ):
        http.post("/event", json=turn_end("kept", "k1", "k2", seq=5))
        yield http


def refused(http: httpx.Client, content: Any, *, raw: bool = False) -> tuple[int, dict[str, Any]]:
    """Status and envelope of a refusal, which changed nothing."""
    body = {"content": content} if raw else {"json": content}
    response = http.post("/event", **body)
    assert response.headers["content-type"] == "application/json"
    reply = response.json()
    assert reply["ok"] is False
    assert reply["error"]
    assert reply.keys() <= {"ok", "type", "error"}
    kept = http.post("/event", json=event("session_map", "kept")).json()
    assert kept["data"]["chunk_hashes"] == ["k1", "k2"]
    assert http.post("/event", json=event("health")).json()["data"]["sessions_count"] == 1
    return response.status_code, reply


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b" ",
        b"{",
        b"[",
        b'{"type":"health"',
        b'{"type":"health"}}',
        b'{"type":"health"} x',
        b"{'type':'health'}",
        b'{"type":"health",}',
        b'{"type":"health"}{"type":"health"}',
        b'[{"type":"health"},]',
        b"type=health",
        b"\xff\xfe",
        b'{"type":"health","x":"\xff"}',
        b'{"type":"health","x":NaN}',
        b'{"type":"health","x":01}',
        b'{"type":"health","x":"\n"}',
        b'{"type":"health","x":"\\q"}',
        b"nul",
    ],
)
def test_what_is_not_json_is_refused_without_a_type(daemon: httpx.Client, content: bytes) -> None:
    status, reply = refused(daemon, content, raw=True)
    assert (status, set(reply)) == (400, {"ok", "error"})


@pytest.mark.parametrize("content", [b"null", b"true", b"1", b"-1.5", b'"health"'])
def test_json_that_is_no_object_or_array_is_refused_without_a_type(
    daemon: httpx.Client, content: bytes
) -> None:
    status, reply = refused(daemon, content, raw=True)
    assert (status, set(reply)) == (400, {"ok", "error"})


@pytest.mark.parametrize("body", [{}, {"session_id": "s"}, {"type": ""}, {"Type": "health"}])
def test_a_missing_or_empty_type_is_refused_in_fixed_words(
    daemon: httpx.Client, body: dict[str, Any]
) -> None:
    status, reply = refused(daemon, body)
    assert (status, reply["error"]) == (400, "missing or empty 'type' field")
    assert "type" in body or "type" not in reply


@pytest.mark.parametrize("type_", ["turn", "TURN_END", "health ", "list-events", "ß"])
def test_an_unknown_type_is_refused_in_fixed_words_and_named(
    daemon: httpx.Client, type_: str
) -> None:
    status, reply = refused(daemon, event(type_, "s"))
    assert status == 400
    assert reply == {"ok": False, "type": type_, "error": "unknown event type"}


@pytest.mark.parametrize("type_", NEED_A_SESSION)
def test_a_missing_or_empty_session_id_is_refused_in_fixed_words(
    daemon: httpx.Client, type_: str
) -> None:
    fields: dict[str, Any] = PARAMS if type_ == "turn_end" else {}
    error = "missing required field 'session_id'"
    assert refused(daemon, event(type_, **fields)) == (
        400,
        {"ok": False, "type": type_, "error": error},
    )
    error = "session_id must not be empty"
    assert refused(daemon, event(type_, "", **fields)) == (
        400,
        {"ok": False, "type": type_, "error": error},
    )


def test_a_missing_kv_transfer_params_is_refused_in_fixed_words(daemon: httpx.Client) -> None:
    status, reply = refused(daemon, event("turn_end", "kept"))
    assert (status, reply["error"]) == (400, "missing required field 'kv_transfer_params'")


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"chunk_hashes": None},
        {"chunk_hashes": "abc"},
        {"chunk_hashes": {"0": "a"}},
        {"chunk_hashes": 7},
        {"chunk_hashes": ["a", ""]},
        {"chunk_hashes": ["a", None]},
        {"chunk_hashes": ["a", 7]},
        {"chunk_hashes": [["a"]]},
        {"chunk_hash": ["a"]},
    ],
    ids=repr,
)
def test_chunk_hashes_that_are_no_list_of_non_empty_strings_are_refused(
    daemon: httpx.Client, params: dict[str, Any]
) -> None:
    for session_id in ("kept", "new"):
        status, reply = refused(daemon, event("turn_end", session_id, kv_transfer_params=params))
        assert (status, reply["type"]) == (400, "turn_end")
        assert reply["error"].startswith("invalid turn_end payload: ")
        assert "chunk_hashes" in reply["error"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (event("turn_end", "kept", **PARAMS, seq="6"), "seq"),
        (event("turn_end", "kept", **PARAMS, seq=6.5), "seq"),
        (event("turn_end", "kept", **PARAMS, seq=True), "seq"),
        (event("turn_end", "kept", **PARAMS, finish_reason=7), "finish_reason"),
        (event("turn_end", "kept", **PARAMS, debug_context="x"), "debug_context"),
        (event("turn_end", "kept", **PARAMS, debug_context={"messages": 7}), "messages"),
        (event("turn_end", "kept", **PARAMS, debug_context={"timing": []}), "timing"),
        (
            event("turn_end", "kept", **PARAMS, debug_context={"timing": {"ttft_ms": "x"}}),
            "ttft_ms",
        ),
        (event("turn_end", "kept", kv_transfer_params=[]), "kv_transfer_params"),
        (event("turn_start", "kept", lookup_id=7), "lookup_id"),
        (event("snapshot_restore", "new", source_session_id=["kept"]), "source_session_id"),
        (event("session_fork", "kept", child_session_id=7), "child_session_id"),
        (event("session_fork_end", "kept", fork_id="1"), "fork_id"),
        (event("session_fork_end", "kept", fork_id=1.5), "fork_id"),
        *(({"type": type_, "session_id": 7, **PARAMS}, "session_id") for type_ in NEED_A_SESSION),
    ],
    ids=repr,
)
def test_a_field_of_the_wrong_kind_is_refused_and_named(
    daemon: httpx.Client, body: dict[str, Any], field: str
) -> None:
    status, reply = refused(daemon, body)
    assert (status, reply["type"]) == (400, body["type"])
    assert field in reply["error"]


@pytest.mark.parametrize("type_", ["session_map", "session_fork"])
def test_an_unknown_session_is_not_found(daemon: httpx.Client, type_: str) -> None:
    error = "session 'it's \"odd\"' not found"
    assert refused(daemon, event(type_, 'it\'s "odd"')) == (
        404,
        {"ok": False, "type": type_, "error": error},
    )


@pytest.mark.parametrize(
    "content",
    [
        b'{"type":"session_fork_end","session_id":"x","fork_id":%d}' % 2**70,
        b'{"type":"session_fork_end","session_id":"x","fork_id":-1}',
        b'{"type":"turn_end","session_id":"kept","kv_transfer_params":{"chunk_hashes":["k1","k2"]},'
        b'"seq":%d}' % -(2**70),
        b'{"type":"session_map","session_id":"\\ud800"}',
        b'{"type":"turn_end","session_id":"kept","kv_transfer_params":{"chunk_hashes":["\\ud800"]}}',
        b'{"type":"\\ud800"}',
        b'{"type":7}',
        b'{"type":null,"session_id":"x"}',
        b'{"type":["health"]}',
        b'{"type":"health","x":1e999}',
        b'{"type":"health","x":%b%b}' % (b"[" * 60_000, b"]" * 60_000),
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"[[]]",
        b"\xef\xbb\xbf" + b'{"type":"health"}',
    ],
    ids=lambda content: content[:60],
)
def test_strange_values_get_an_answer_of_the_contract(daemon: httpx.Client, content: bytes) -> None:
    response = daemon.post("/event", content=content)
    assert response.status_code in STATUSES - {503}
    assert response.headers["content-type"] == "application/json"
    replies = response.json()
    for reply in replies if isinstance(replies, list) else [replies]:
        assert ("data" in reply) is reply["ok"] is ("error" not in reply)
    kept = daemon.post("/event", json=event("session_map", "kept")).json()
    assert kept["data"]["chunk_hashes"] == ["k1", "k2"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND"])
def test_any_other_method_on_event_is_refused(daemon: httpx.Client, method: str) -> None:
    response = daemon.request(method, "/event")
    reply = response.json()
    assert response.status_code == 405
    assert response.headers["content-type"] == "application/json"
    assert (reply["ok"], set(reply)) == (False, {"ok", "error"})


@pytest.mark.parametrize(
    "path", ["/", "/events", "/Event", "/event/x", "/health", "/a?b=%ff", "/%2e"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_any_other_path_is_not_found(daemon: httpx.Client, method: str, path: str) -> None:
    response = daemon.request(method, path)
    reply = response.json()
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/json"
    assert (reply["ok"], set(reply)) == (False, {"ok", "error"})
