"""Reads recorded request traces: JSON lines, gzipped or plain, one inference request a line.

A trace is streamed, never held: `survey` makes one pass that validates every line and keeps
only each session's last position, `read_trace` makes the pass that is played.
"""

from __future__ import annotations

import gzip
import zlib
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import msgspec

from ramakv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedReader
    from pathlib import Path

LINE_BYTES_MAX = 8 * 1024 * 1024

# Fitted to the 14,432 durations recorded in claude_code_busy_local: the median error is about
# 1 s, at a median duration of 6 s.
PREFILL_TOKENS_PER_SECOND = 50_000
DECODE_TOKENS_PER_SECOND = 60

_GZIP_MAGIC = b"\x1f\x8b"
_EXAMPLE = '{"t": 1.5, "session": "s1", "turn": 1, "in": 900, "out": 20, "hashes": [0, 1]}'
_UINT64 = 2**64 - 1
_HASH_TEXTS_KEPT_MAX = 65_536

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One inference request: a turn of a session."""

    t: Seconds
    """Arrival, in seconds from the start of the trace."""
    session: Annotated[str, msgspec.Meta(min_length=1)]
    turn: Count
    tokens_in: Count = msgspec.field(name="in")
    tokens_out: Count = msgspec.field(name="out")
    hashes: list[Count]
    """Prefix-chained block ids: an equal id means an equal prefix up to and with that block."""
    dur: Seconds | None = None
    """The seconds that the server worked on it, where they were recorded."""
    stop: str | None = None
    """Why the model stopped, `tool_use` or `end_turn`, where it was recorded."""
    parent: str | None = None
    """`session:turn` that this session was forked from or spawned by."""

    def service_seconds(self) -> float:
        """How long the server works on this request: as recorded, else by the service model."""
        if self.dur is not None:
            return self.dur
        return (
            self.tokens_in / PREFILL_TOKENS_PER_SECOND + self.tokens_out / DECODE_TOKENS_PER_SECOND
        )


class Survey(msgspec.Struct, frozen=True):
    """What one pass over a trace keeps of it."""

    requests: int
    last: dict[str, int]
    """Session → the position, from 0, of its last request."""


_decoder = msgspec.json.Decoder(Request)


def survey(path: Path, limit: int | None = None) -> Survey:
    """Validate a trace, or its first `limit` requests, and find where each session ends.

    Raises ConfigError if it cannot be read; the message names the file, the line, what is wrong
    and what was expected.
    """
    last: dict[str, int] = {}
    requests = 0
    for request in read_trace(path, limit):
        last[request.session] = requests
        requests += 1
    if not requests:
        raise ConfigError(f"{path}: holds no requests; expected lines like {_EXAMPLE}")
    return Survey(requests, last)


def read_trace(path: Path, limit: int | None = None) -> Iterator[Request]:
    """Yield a trace's requests in its order, at most `limit` of them.

    Blank lines are skipped. Raises ConfigError like `survey`.
    """
    earlier = 0.0
    found = 0
    for number, line in _lines(path):
        if line.isspace():
            continue
        try:
            request = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _fault(path, number, f"{error}; expected a request like {_EXAMPLE}") from None
        if request.t < earlier:
            raise _fault(
                path, number, f"t {request.t:g} comes after {earlier:g}; expected time order"
            )
        earlier = request.t
        yield request
        found += 1
        if found == limit:
            return


@lru_cache(maxsize=_HASH_TEXTS_KEPT_MAX)
def chunk_hash(block: int) -> str:
    """The chunk hash that stands for a trace's block id: equal ids, equal hashes.

    It has the form that LMCache sends: unpadded hexadecimal of a signed 64-bit integer. The
    mixing (splitmix64) is a bijection, so different ids below 2**64 never share a hash.
    """
    x = (block + 0x9E3779B97F4A7C15) & _UINT64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _UINT64
    x ^= x >> 31
    return f"{x - 2**64 if x >> 63 else x:x}"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield a file's lines, numbered from 1."""
    number = 1
    try:
        with _opened(path) as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                if len(line) > LINE_BYTES_MAX:
                    raise _fault(path, number, f"too long; expected at most {LINE_BYTES_MAX} bytes")
                yield number, line
                number += 1
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _fault(path, number, f"{error}; expected a whole gzip file") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{path}: {reason}; expected a trace that can be read") from None


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader | gzip.GzipFile]:
    """Open a trace. Its first bytes, not its name, tell whether it is gzipped."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: not a regular file; expected one, for it is read twice")
    with path.open("rb") as file:
        zipped = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file.seek(0)
        if not zipped:
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unzipped:
            yield unzipped


def _fault(path: Path, number: int, what: str) -> ConfigError:
    return ConfigError(f"{path}, line {number}: {what}")
