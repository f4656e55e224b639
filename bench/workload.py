"""The events that are sent: sessions of 200 chunks, of which 10 change each turn.

Session ids have one length, and so do hashes: two events of a kind differ in no byte count.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

KINDS = ("health", "turn_start", "session_map", "turn_end")


@dataclass(frozen=True, slots=True)
class Workload:
    """Which sessions there are, and what their chunks look like."""

    sessions: int = 1000
    chunks: int = 200
    changed: int = 10
    hash_chars: int = 64

    def __post_init__(self) -> None:
        if self.hash_chars % 8 or not 0 < self.changed <= self.chunks:
            raise ValueError("expected hash_chars a multiple of 8, and changed from 1 to chunks")

    def session_ids(self) -> list[str]:
        """Return all ids, in an order that says nothing of where their rows lie."""
        ids = [session_id(number) for number in range(self.sessions)]
        random.Random(self.sessions).shuffle(ids)
        return ids

    def kept(self, session: str) -> list[str]:
        """Return the chunks that stay in every turn; no other session has them."""
        return self._hashes(random.Random(session), self.chunks - self.changed)

    def fresh(self, rng: random.Random) -> list[str]:
        """Return the chunks that are new in a turn."""
        return self._hashes(rng, self.changed)

    def _hashes(self, rng: random.Random, count: int) -> list[str]:
        size = self.hash_chars
        text = rng.randbytes(count * size // 2).hex()
        return [text[start : start + size] for start in range(0, count * size, size)]

    def beginning(self, kind: str, session: str) -> str:
        """Return an event as text: whole, but for a turn_end, which lacks its fresh chunks."""
        if kind == "health":
            return '{"type":"health"}'
        start = f'{{"type":"{kind}","session_id":"{session}"'
        if kind != "turn_end":
            return start + "}"
        kept = "".join(f'"{chunk}",' for chunk in self.kept(session))
        return f'{start},"kv_transfer_params":{{"chunk_hashes":[{kept}'

    def event(self, kind: str, session: str, rng: random.Random) -> bytes:
        """Return an event as it is sent."""
        text = self.beginning(kind, session)
        if kind == "turn_end":
            text += json.dumps(self.fresh(rng), separators=(",", ":"))[1:] + "}}"
        return text.encode()


def session_id(number: int) -> str:
    """Return the id of a session."""
    return f"s{number:06d}"
