"""Damage to what is right: cheap, by the thousand, and the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.hostile.house import encoded, event, turn_end

BODY_TOKENS = [
    *(b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"-", b"e9999", b".5"),
    *(b"\\ud800", b"\xff", b"\0", b" ", b'"type":', b'"session_id":', b'"x":NaN', b"0" * 30),
]
SEEDS = [
    encoded(body)
    for body in (
        event("health"),
        event("list_events"),
        turn_end("s", "h-1", "é"),
        turn_end("s", "a", "b", "a", seq=2**53, finish_reason="tool_calls", x=[{"y": 1.5e300}]),
        turn_end(
            "t", "a", debug_context={"messages": [{"role": "user"}], "timing": {"ttft_ms": 1}}
        ),
        event("turn_start", "s", lookup_id="l"),
        event("snapshot_restore", "t", source_session_id="s"),
        event("session_map", "s"),
        event("session_suspend", "s"),
        event("session_fork", "s", child_session_id="t"),
        event("session_fork_end", "s", fork_id=-(2**63)),
        event("session_close", "s"),
        [turn_end("s", "a"), event("session_map", "s"), {"type": "?"}],
    )
]
"""Bodies that are right."""


def mutated(chance: random.Random, data: bytes, tokens: Sequence[bytes]) -> bytes:
    """Change a byte or a few, cut, repeat, or put something in; sometimes nothing at all."""
    changed = bytearray(data)
    for _ in range(chance.choice([0, 1, 1, 2, 4])):
        place = chance.randrange(len(changed) + 1)
        match chance.randrange(6):
            case 0 if place < len(changed):
                changed[place] ^= 1 << chance.randrange(8)
            case 1:
                changed[place:place] = chance.choice(tokens)
            case 2:
                del changed[place : place + chance.randrange(1, 9)]
            case 3:
                del changed[place:]
            case 4:
                changed[place:place] = changed[place : place + chance.randrange(1, 60)]
            case _:
                other = chance.randrange(len(changed) + 1)
                changed[place:place] = changed[other : other + chance.randrange(1, 40)]
    return bytes(changed)
