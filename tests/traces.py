"""Makes small traces that look like real ones: the same seed, the same trace."""

from __future__ import annotations

import gzip
import random
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from ramakv.commands.trace import Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

BLOCK_TOKENS = 512


def make_trace(
    seed: int = 0,
    *,
    sessions: int = 8,
    turns_max: int = 6,
    prefixes: int = 2,
    prefix_blocks: int = 5,
    span_seconds: float = 60.0,
    truncate_share: float = 0.1,
    dur_share: float = 0.9,
) -> list[Request]:
    """Make agent sessions that start within `span_seconds`, in time order.

    Sessions share one of a few system prompts (`prefixes`, each of `prefix_blocks` blocks) and
    then grow: every turn adds blocks to its history. After a tool call the pause is short, after
    the end of a turn it is long. Now and then a history is cut back to the system prompt and a
    summary. A few sessions are forked from an earlier one and start with its history. Most
    requests, not all, know their duration and why the model stopped.
    """
    rng = random.Random(seed)
    ids = count()
    system_prompts = [[next(ids) for _ in range(prefix_blocks)] for _ in range(prefixes)]
    requests: list[Request] = []
    for number in range(sessions):
        prompt = rng.choice(system_prompts)
        history, parent = list(prompt), None
        start = rng.uniform(0, span_seconds)
        started = [request for request in requests if request.t < start]
        if started and rng.random() < 0.15:
            origin = rng.choice(started)
            history, parent = list(origin.hashes), f"{origin.session}:{origin.turn}"
        requests += _session(
            rng,
            ids,
            f"s{number:04d}",
            start,
            history,
            len(prompt),
            parent=parent,
            turns=rng.randint(1, turns_max),
            truncate_share=truncate_share,
            dur_share=dur_share,
        )
    return sorted(requests, key=lambda request: request.t)


def _session(
    rng: random.Random,
    ids: Iterator[int],
    session: str,
    t: float,
    history: list[int],
    prompt_blocks: int,
    *,
    parent: str | None,
    turns: int,
    truncate_share: float,
    dur_share: float,
) -> Iterator[Request]:
    for turn in range(1, turns + 1):
        if turn > 2 and rng.random() < truncate_share:
            history = history[:prompt_blocks]
        history = history + [next(ids) for _ in range(rng.randint(1, 4))]
        stop = "tool_use" if turn < turns and rng.random() < 0.8 else "end_turn"
        tokens_out = rng.randint(20, 400)
        dur = round(tokens_out / 60 + 0.2, 3)
        known = rng.random() < dur_share
        yield Request(
            t=round(t, 3),
            session=session,
            turn=turn,
            tokens_in=len(history) * BLOCK_TOKENS + rng.randint(0, BLOCK_TOKENS - 1),
            tokens_out=tokens_out,
            hashes=history,
            dur=dur if known else None,
            stop=stop if known else None,
            parent=parent if turn == 1 else None,
        )
        t += dur + (rng.uniform(0.5, 5) if stop == "tool_use" else rng.uniform(10, 120))


def write_trace(path: Path, requests: Iterable[Request]) -> Path:
    """Write requests as JSON lines, gzipped if the name ends in .gz; return the path."""
    text = b"".join(msgspec.json.encode(request) + b"\n" for request in requests)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    return path
