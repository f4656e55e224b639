"""The trace reader, and the traces that tests make."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ramakv.commands.trace import LINE_BYTES_MAX, chunk_hash, read_trace, survey
from ramakv.errors import ConfigError
from tests.traces import make_trace, write_trace

GOOD: dict[str, Any] = {"t": 1, "session": "a", "turn": 1, "in": 9, "out": 2, "hashes": [0, 1]}


def line(**changes: Any) -> bytes:
    """Encode a request of which some fields are changed, or left out where None."""
    fields = {key: value for key, value in (GOOD | changes).items() if value is not None}
    return json.dumps(fields).encode() + b"\n"


def fault(path: Path, content: bytes) -> str:
    """Read a trace that is at fault, and return what the reader says."""
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        survey(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert "expected" in message
    return message


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_reads_what_was_written(tmp_path: Path, name: str) -> None:
    """A trace survives the round trip, gzipped or plain, whole or in part."""
    requests = make_trace(3)
    path = write_trace(tmp_path / name, requests)
    assert list(read_trace(path)) == requests
    assert list(read_trace(path, 5)) == requests[:5]
    assert list(read_trace(path, 10_000)) == requests


def test_gzip_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(line()))
    assert survey(path).requests == 1


def test_survey_finds_last_positions_within_the_limit(tmp_path: Path) -> None:
    sessions = ["a", "b", "a", "c", "b", "a"]
    lines = (line(t=t, session=s) for t, s in enumerate(sessions))
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lines))
    assert survey(path).last == {"a": 5, "b": 4, "c": 3}
    assert survey(path, 4).last == {"a": 2, "b": 1, "c": 3}
    assert survey(path, 4).requests == 4


def test_blank_lines_and_unknown_fields_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n" + line(note="x") + b"  \n" + line(stop="refusal"))
    assert [request.stop for request in read_trace(path)] == [None, "refusal"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"{", "truncated"),
        (b"{]", "malformed"),
        (b"[]\n", "Expected `object`"),
        (b"\xff\xfe\n", "malformed"),
        (b'{"t": 1, "session": "\xff"}\n', "UTF-8"),
        (b"[" * 100_000, "Expected `object`"),
        (line(hashes=None), "missing required field `hashes`"),
        (line(session=""), "length >= 1"),
        (line(session=7), "Expected `str`"),
        (line(hashes=[0, "x"]), "$.hashes[1]"),
        (line(hashes=[-1]), "`int` >= 0"),
        (line(t=-1), ">= 0"),
        (line(turn=1.5), "$.turn"),
        (line().replace(b"1,", b"1e999,", 1), "out of range"),
        (line(t=0.5), "0.5 comes after 1"),
        (b" " * (LINE_BYTES_MAX + 1), "too long"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, bad: bytes, said: str) -> None:
    """One line says which file and line is at fault, what it holds and what was expected."""
    message = fault(tmp_path / "trace.jsonl", line() + line() + bad)
    assert f"{tmp_path / 'trace.jsonl'}, line 3: " in message
    assert said in message


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        survey(tmp_path / "none")
    with pytest.raises(ConfigError, match="not a regular file"):
        survey(tmp_path)
    assert "no requests" in fault(tmp_path / "trace", b"\n\n")


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(line(t=t, note=os.urandom(99).hex()) for t in range(99)))
    assert "whole gzip" in fault(tmp_path / "cut.gz", whole[: len(whole) // 2])
    assert "whole gzip" in fault(tmp_path / "magic.gz", b"\x1f\x8bnothing of the kind")
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes(b ^ 0xFF for b in whole[middle:])
    assert "line " in fault(tmp_path / "flipped.gz", flipped)


def test_chunk_hashes_look_like_those_of_lmcache() -> None:
    """Equal ids have equal hashes, different ids different ones, in signed 64-bit hexadecimal."""
    hashes = [chunk_hash(block) for block in range(10_000)]
    assert hashes[:2] == ["-1ddf57c684e23251", "-6ef5d21376fda33f"]
    assert len(set(hashes)) == len(hashes)
    assert all(re.fullmatch(r"-?[1-9a-f][0-9a-f]{0,15}", text) for text in hashes)
    assert all(-(2**63) <= int(text, 16) < 2**63 for text in hashes)
    assert 0.4 < sum(text.startswith("-") for text in hashes) / len(hashes) < 0.6


def test_made_traces_look_real() -> None:
    """They repeat by seed, keep order, share prefixes and hold every kind of request."""
    trace = make_trace(1, sessions=40)
    assert trace == make_trace(1, sessions=40) != make_trace(2, sessions=40)
    assert [r.t for r in trace] == sorted(r.t for r in trace)
    assert {r.stop for r in trace} == {"tool_use", "end_turn", None}
    assert {r.dur is None for r in trace} == {r.parent is None for r in trace} == {True, False}
    assert len({r.hashes[0] for r in trace}) == 2
    sizes = {
        s: [len(r.hashes) for r in trace if r.session == s] for s in {r.session for r in trace}
    }
    assert any(size != sorted(size) for size in sizes.values())
    before: dict[int, tuple[int, ...]] = {}
    for request in trace:
        for position, block in enumerate(request.hashes):
            prefix = tuple(request.hashes[:position])
            assert before.setdefault(block, prefix) == prefix, "an id stands for one prefix"


@pytest.mark.traces
@pytest.mark.skipif("RAMAKV_TRACES" not in os.environ, reason="RAMAKV_TRACES names no folder")
def test_recorded_traces_can_be_read() -> None:
    paths = sorted(Path(os.environ["RAMAKV_TRACES"]).glob("*.jsonl.gz"))
    assert paths
    for path in paths:
        plan = survey(path)
        assert max(plan.last.values()) == plan.requests - 1
