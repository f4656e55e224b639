"""Bodies that no client should send: refused in the contract's words, they change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.house import (
    WITNESS,
    House,
    check_envelopes,
    event,
    living_in,
    turn_end,
    unchanged,
)

DEEP = 100_000
BIG = "x" * 1_000_000
HASHES_MAX = 32_768
ID_CHARS_MAX = 256
BATCH_MAX = 1024

OBJECT = b'{"type":"turn_end","session_id":"new","kv_transfer_params":{"chunk_hashes":["a"]},%b}'


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One daemon for all tests of this file. It writes debug files: they keep what was sent."""
    folder = tmp_path_factory.mktemp("house")
    with living_in(folder, debug_enabled=True) as house:
        yield house


def refused(house: House, body: Any, status: int = 400) -> dict[str, Any]:
    """Send what must be refused and change nothing; returns the envelope."""
    with unchanged(house):
        answer = house.ask(body)
        (envelope,) = check_envelopes(answer)
    assert (answer.status, envelope["ok"]) == (status, False), envelope
    return envelope


def nested(opening: bytes, closing: bytes, depth: int = DEEP) -> bytes:
    return opening * depth + b"1" + closing * depth


# Not JSON, or hardly


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0",
        b"\0" * 100_000,
        b" " * 1_000_000,
        b"\xef\xbb\xbf",
        b'\xef\xbb\xbf{"type":"health"}',
        '{"type":"health"}'.encode("utf-16"),
        '{"type":"health"}'.encode("utf-32"),
        b'{"type":"health","x":"\xc0\x80"}',
        b'{"type":"health","x":"\xed\xa0\x80"}',
        b'{"type":"health","\xff":1}',
        b'[{"type":"health"},"\xf8"]',
        b'{"type":"health","x":NaN}',
        b'{"type":"health","x":-Infinity}',
        b'{"type":"health","x":"\\ud800"}',
        b'{"type":"health","x":"\\udc00\\ud800"}',
        b'{"type":"health","x":"\x1f"}',
        b'{"type":"health","x":"\x7f"}}',
        b'{"type":"health"}\0',
        b'{"type":"health"} {"type":"health"}',
        b"[",
        b"[,]",
        b'[{"type":"health"}',
        b"---\ntype: health\n",
        b"type=health&session_id=s",
        b"<event type='health'/>",
        b"--x\r\ncontent-disposition: form-data\r\n\r\nhealth\r\n--x--\r\n",
        bytes(range(256)) * 400,
    ],
    ids=lambda body: repr(body[:40]),
)
def test_what_is_not_json_is_400_without_a_type(house: House, body: bytes) -> None:
    assert "type" not in refused(house, body)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * DEEP,
        b'{"a":' * DEEP,
        nested(b"[", b"]"),
        nested(b'{"type":', b"}"),
        b'{"type":"health","x":' + nested(b"[", b"]") + b"}",
        b'{"type":"health","x":' + nested(b'{"a":', b"}") + b"}",
        b'{"x":' + nested(b"[{", b"}]") + b',"type":"health"}',
        b'{"type":' + nested(b"[", b"]") + b"}",
        b'{"type":"session_map","session_id":' + nested(b"[", b"]") + b"}",
        OBJECT % (b'"debug_context":{"messages":[' + nested(b"[", b"]") + b"]}"),
        OBJECT % (b'"debug_context":{"messages":[' + nested(b'{"a":', b"}") + b"]}"),
        OBJECT % (b'"debug_context":{"timing":' + nested(b'{"ttft_ms":', b"}") + b"}"),
        OBJECT % (b'"kv_transfer_params":' + nested(b'{"chunk_hashes":', b"}")),
        b'[{"type":"health","x":' + nested(b"[", b"]") + b"}]",
    ],
    ids=lambda body: repr(body[:60]),
)
def test_deep_nesting_is_400(house: House, body: bytes) -> None:
    refused(house, body)


def test_nesting_as_deep_as_is_read_can_be_kept(house: House) -> None:
    for depth in (50, 500, 900):
        messages = b'"debug_context":{"messages":[' + nested(b"[", b"]", depth) + b"]}"
        answer = house.ask(OBJECT % messages)
        (envelope,) = check_envelopes(answer)
        assert (answer.status, envelope["ok"]) in ((200, True), (400, False))
    assert house.ask(event("session_close", "new")).status == 200


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 5000, "-" + "9" * 100_000])
@pytest.mark.parametrize(
    "place",
    [
        b'{"type":"session_map","session_id":%b}',
        b'{"type":"session_fork_end","session_id":"new","fork_id":%b}',
        b'{"type":%b}',
        OBJECT % b'"seq":%b',
        OBJECT % b'"debug_context":{"timing":{"ttft_ms":%b}}',
        OBJECT % b'"debug_context":{"messages":[%b]}',
        OBJECT % b'"kv_transfer_params":{"chunk_hashes":[%b]}',
    ],
    ids=range(7),
)
def test_a_number_that_cannot_be_read_is_400_where_it_is_looked_at(
    house: House, place: bytes, number: str
) -> None:
    envelope = refused(house, place % number.encode())
    assert envelope["error"] == "a number is out of the range that can be read"
    assert house.ask(b'{"type":"health","x":%b}' % number.encode()).status == 200


def test_an_integer_beyond_64_bits_is_400_where_it_must_be_kept(house: House) -> None:
    for number in (2**63, -(2**63) - 1, 2**64, 10**400):
        for body in (
            turn_end("new", "a", seq=number),
            event("session_fork_end", "new", fork_id=number),
        ):
            assert "expected int" in refused(house, body)["error"]


# Megabytes, and what is made of them


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"type": BIG}, 400, "unknown event type"),
        ({"type": "😀" * 200_000}, 400, "unknown event type"),
        (f'{{"type":"health","type":"{BIG}"}}'.encode(), 400, "unknown event type"),
        (f'{{"type":"{BIG}","type":"health"}}'.encode(), 400, "type: invalid value"),
        (event("session_map", BIG), 413, "session_id"),
        (event("session_map", WITNESS, **{BIG: 1}, kv_transfer_params=BIG), 200, ""),
        (event("turn_start", WITNESS, lookup_id=BIG), 413, "lookup_id"),
        (event("session_fork", WITNESS, child_session_id=BIG), 413, "child_session_id"),
        (event("snapshot_restore", "new", source_session_id=BIG), 413, "source_session_id"),
        (turn_end("new", BIG), 413, "limits.hash_chars_max"),
        (turn_end("new", "a", seq=BIG), 400, "seq"),
        (event("turn_end", "new", kv_transfer_params={BIG: []}), 400, "chunk_hashes"),
        (event("turn_end", "new", kv_transfer_params=BIG), 400, "kv_transfer_params"),
        (turn_end("new", *(f"{n:x}" for n in range(100_000))), 413, "chunks_per_session_max"),
        (turn_end("new", *["a"] * (HASHES_MAX + 1)), 413, "chunks_per_session_max"),
        (turn_end("new", *["a"] * HASHES_MAX, ""), 400, f"chunk_hashes[{HASHES_MAX}]"),
        ([{"type": "health"}] * (BATCH_MAX + 1), 413, "limits.batch_events_max"),
        (b"[" + b"1," * 3_000_000 + b"1]", 413, "limits.batch_events_max"),
        (b"x" * (8 * 1024 * 1024 + 1), 413, "limits.body_bytes_max"),
    ],
    ids=lambda value: repr(value)[:50] if not isinstance(value, int) else "",
)
def test_megabytes_are_refused_in_few_words(
    house: House, body: Any, status: int, error: str
) -> None:
    if status == 200:
        assert house.ask(body).status == 200
    else:
        assert error in refused(house, body, status)["error"]


def test_lists_at_their_limits_are_taken(house: House) -> None:
    """Also with the longest hashes, and with each of them many times over."""
    wide = [f"{n:x}" for n in range(HASHES_MAX)]
    repeated = ["a", "b", "\0", "é", "😀"] * 6000
    for hashes in (wide, repeated, ["h" * 256, "😀" * 256], []):
        with unchanged(house):
            data = house.ask(turn_end("large", *hashes)).envelope["data"]
            assert data["chunk_count"] == len(hashes)
            assert map_of(house, "large") == hashes
            data = house.ask(event("session_close", "large")).envelope["data"]
            assert data["evicted_count"] == len(set(hashes))
            assert house.ask(event("turn_start", "large")).status == 200  # a life of its own


def map_of(house: House, session_id: str) -> list[str]:
    data = house.ask(event("session_map", session_id)).envelope["data"]
    return list(data["chunk_hashes"])


# Names


@pytest.mark.parametrize(
    "name",
    [
        "\0",
        "a\0b",
        "\x01\x1b[31m\x7f\r\n",
        "../../../etc/passwd",
        "/etc/passwd",
        "..",
        "C:\\windows\\nul",
        "'; DROP TABLE sessions; --",
        "%s%n%00",
        "\u202egnp.exe",
        "\ufeff\ufffe\uffff",
        " ",
        "é" * ID_CHARS_MAX,
        "😀" * ID_CHARS_MAX,
        "a" * ID_CHARS_MAX,
        "e\u0301" * (ID_CHARS_MAX // 2),
    ],
    ids=lambda name: repr(name[:20]),
)
def test_any_text_is_a_name_and_stays_what_it_was(house: House, name: str) -> None:
    with unchanged(house):
        assert house.ask(turn_end(name, name, "b")).envelope["data"]["debug_written"]
        told = house.ask(event("session_map", name)).envelope["data"]
        assert told == {"session_id": name, "chunk_hashes": [name, "b"]}
        assert house.ask(event("session_fork", name)).status == 200
        assert house.ask(event("session_suspend", name)).status == 200
        assert house.ask(event("turn_start", name)).envelope["data"]["restored"]
        assert house.ask(event("session_fork_end", name)).envelope["data"]["matched"]
        assert house.ask(event("session_close", name)).status == 200
        assert house.ask(event("turn_start", name)).status == 200  # forgotten at once
    debug_dir = Path(house.config.debug_dir)
    assert {path.parent for path in debug_dir.parent.rglob("kvcache_debug_*")} == {debug_dir}


@pytest.mark.parametrize("letter", ["a", "é", "😀", "\0"])
def test_a_name_is_measured_in_characters(house: House, letter: str) -> None:
    longer = letter * (ID_CHARS_MAX + 1)
    for body in (
        event("session_map", longer),
        turn_end(longer, "a"),
        turn_end("new", longer),
        event("turn_start", WITNESS, lookup_id=longer),
        event("snapshot_restore", WITNESS, source_session_id=longer),
        event("session_fork", WITNESS, child_session_id=longer),
    ):
        error = refused(house, body, 413)["error"]
        assert "257 characters" in error
        assert "chars_max (256)" in error
    assert "not found" in refused(house, event("session_map", longer[1:]), 404)["error"]


# Wrong kinds

KINDS: dict[str, Any] = {
    "null": None,
    "boolean": True,
    "integer": 7,
    "fraction": 1.5,
    "string": "text",
    "array": [],
    "object": {},
    "arrays": [[[["a"]]]],
}
TEXT, MAYBE_TEXT = {"string"}, {"string", "null"}
MAYBE_INTEGER = {"integer", "null"}
MAYBE_NUMBER = {"integer", "fraction", "null"}
FIELDS: dict[str, dict[str, set[str]]] = {
    "turn_start": {"lookup_id": MAYBE_TEXT},
    "turn_end": {
        "kv_transfer_params": set(),
        "kv_transfer_params.chunk_hashes": {"array"},
        "kv_transfer_params.chunk_hashes.0": TEXT,
        "seq": MAYBE_INTEGER,
        "finish_reason": MAYBE_TEXT,
        "debug_context": {"object", "null"},
        "debug_context.messages": {"array", "arrays", "null"},
        "debug_context.timing": {"object", "null"},
        "debug_context.timing.ttft_ms": MAYBE_NUMBER,
        "debug_context.timing.total_time_ms": MAYBE_NUMBER,
        "debug_context.timing.tpot_ms": MAYBE_NUMBER,
    },
    "snapshot_restore": {"source_session_id": MAYBE_TEXT},
    "session_map": {},
    "session_close": {},
    "session_suspend": {},
    "session_fork": {"child_session_id": MAYBE_TEXT},
    "session_fork_end": {"fork_id": MAYBE_INTEGER},
}
WRONG = [
    (type_, path, kind)
    for type_, fields in FIELDS.items()
    for path, right in {"session_id": TEXT, "type": TEXT, **fields}.items()
    for kind in sorted(KINDS.keys() - right)
]


def placed(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, name = path.split(".")
    inner = body
    for parent in parents:
        inner = inner.setdefault(parent, {})
        if isinstance(inner, list):
            break
    if isinstance(inner, list):
        inner[0] = value
    else:
        inner[name] = value
    return body


@pytest.mark.parametrize("batch", [False, True], ids=["alone", "in a batch"])
def test_a_wrong_kind_in_any_field_of_any_event_is_named(house: House, batch: bool) -> None:
    assert len(WRONG) > 180
    with unchanged(house):
        for type_, path, kind in WRONG:
            body = turn_end("new", "a") if type_ == "turn_end" else event(type_, "new")
            body = placed(body, path, KINDS[kind])
            answer = house.ask([body] if batch else body)
            (envelope,) = check_envelopes(answer)
            assert (answer.status, envelope["ok"]) == (200 if batch else 400, False), body
            if path == "type":
                assert envelope == {"ok": False, "error": "missing or empty 'type' field"}
            else:
                assert envelope["type"] == type_
                assert path.split(".")[-1].replace("0", "[0]") in envelope["error"], body


def test_a_key_that_stands_there_twice_is_read_once(house: House) -> None:
    """Either value may count, but all of the daemon must go by the same."""
    twice = b'{"type":"session_map","session_id":"%b","session_id":"%b"}'
    for first, second in ((WITNESS, "nobody"), ("nobody", WITNESS)):
        answer = house.ask(twice % (first.encode(), second.encode()))
        (envelope,) = check_envelopes(answer)
        named = envelope["data"]["session_id"] if envelope["ok"] else "nobody"
        assert named == second
    types = b'{"type":"%b","type":"%b","session_id":"%b"}'
    for first, second in ((b"session_map", b"session_close"), (b"session_close", b"session_map")):
        refused(house, types % (first, second, WITNESS.encode()))


# Batches


def test_an_empty_batch_is_answered_empty(house: House) -> None:
    with unchanged(house):
        for body in (b"[]", b" \r\n\t[ ] "):
            answer = house.ask(body)
            assert (answer.status, answer.envelope) == (200, [])


def test_a_batch_that_is_bad_throughout_changes_nothing(house: House) -> None:
    bad = [7, None, "x", [], [[]], {}, {"type": "x"}, {"type": "turn_end"}, turn_end("", "a")]
    with unchanged(house):
        envelopes = check_envelopes(house.ask(bad * 113))
    assert len(envelopes) == 113 * len(bad)
    assert not any(envelope["ok"] for envelope in envelopes)
    assert envelopes[: len(bad)] * 113 == envelopes


def test_the_bad_in_a_batch_does_the_good_no_harm(house: House) -> None:
    good = [turn_end("mixed", "a"), turn_end("mixed", "a", "b"), event("session_map", "mixed")]
    bad = [turn_end("mixed", ""), turn_end(BIG, "a"), {"type": BIG}, nested_list(900), [good]]
    batch = [each for pair in zip(good, bad, strict=False) for each in pair] + bad
    with unchanged(house):
        envelopes = check_envelopes(house.ask(batch))
        assert [envelope["ok"] for envelope in envelopes] == [True, False] * 3 + [False] * len(bad)
        assert envelopes[4]["data"]["chunk_hashes"] == ["a", "b"]
        assert house.ask([event("session_close", "mixed"), event("turn_start", "mixed")]).status


def nested_list(depth: int) -> Any:
    return json.loads("[" * depth + "]" * depth)


def test_a_batch_cannot_have_an_answer_far_larger_than_itself_made(house: House) -> None:
    """A thousand times the map of a large session: half a gigabyte for 50 KB."""
    hashes = [f"{n:016x}" for n in range(HASHES_MAX)]
    assert house.ask(turn_end("large", *hashes)).status == 200
    asked = [event("session_map", "large")] * BATCH_MAX
    answer = house.ask([*asked[1:], turn_end("large", "a")])
    envelopes = check_envelopes(answer)
    assert len(answer.body) < 9 * 1024 * 1024
    told = sum(envelope["ok"] for envelope in envelopes)
    assert [envelope["ok"] for envelope in envelopes] == [
        *[True] * (told - 1),
        *[False] * (BATCH_MAX - told),
        True,  # what changes something is answered in any case
    ]
    assert 10 < told < 20
    assert "limits.body_bytes_max" in envelopes[-2]["error"]
    assert house.ask([event("session_close", "large"), event("turn_start", "large")]).status == 200
