"""Slot mappings as they are written in a query: `1,2,3,[9,12],17`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

SLOTS_PER_CALL_MAX = 1_048_576
_OUT_OF_BOUNDS_SHOWN_MAX = 16

_ENTRY = re.compile(r"\s*(?:\[\s*(-?\d{1,18})\s*,\s*(-?\d{1,18})\s*\]|(-?\d{1,18}))\s*(?:,|$)")


class SlotBoundsError(ValueError):
    """A slot that the KV cache does not have."""


def parse_slot_mapping(text: str, slots: int) -> list[int]:
    """Return the slots in the order written; a range includes both its ends.

    Raises ValueError when the text is no slot mapping, SlotBoundsError when it names a slot
    that is not in a cache of this many slots.
    """
    runs: list[tuple[int, int]] = []
    position = 0
    while position < len(text) or not runs:
        entry = _ENTRY.match(text, position)
        if entry is None:
            rest = text[position:].split(",", 1)[0].strip()
            raise ValueError(f"Invalid slot format: {rest!r}")
        start, end, single = entry.groups()
        first, last = (single, single) if single is not None else (start, end)
        runs.append((int(first), int(last)))
        if runs[-1][0] > runs[-1][1]:
            raise ValueError(f"Range start {int(first)} must be <= end {int(last)}")
        position = entry.end()
    if text.rstrip().endswith(","):
        raise ValueError("Invalid slot format: ''")
    outside = [slot for run in runs for slot in run if not 0 <= slot < slots]
    if outside:
        shown = list(dict.fromkeys(outside))[:_OUT_OF_BOUNDS_SHOWN_MAX]
        raise SlotBoundsError(f"Slot indices out of bounds: {shown}. Valid range: 0 to {slots - 1}")
    if sum(last - first + 1 for first, last in runs) > SLOTS_PER_CALL_MAX:
        raise ValueError(f"more than {SLOTS_PER_CALL_MAX} slots")
    return [slot for first, last in runs for slot in range(first, last + 1)]


def slot_ranges(slots: Iterable[int]) -> list[int | Sequence[int]]:
    """Write slots shortly: runs of neighbours as `[first, last]`, others as they are."""
    ranges: list[list[int]] = []
    for slot in slots:
        if ranges and slot == ranges[-1][1] + 1:
            ranges[-1][1] = slot
        else:
            ranges.append([slot, slot])
    return [run[0] if run[0] == run[1] else run for run in ranges]
