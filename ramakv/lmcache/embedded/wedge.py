"""The disk lock of LMCache 0.4.4, which some calls never give back.

Whoever asks for the disk after that waits for ever, and the whole port with it: its handlers
run one after the other. Only a restart helps.
"""

from __future__ import annotations

import trio


class ObservedError(Exception):
    """What LMCache 0.4.4 answers with 500, in its words."""


class DiskLock:
    """Whether the disk still answers. It always does unless `observed`."""

    def __init__(self, *, observed: bool) -> None:
        """Start with a disk that answers."""
        self.observed = observed
        self.wedged = False
        self.port_hangs = False

    def wedge(self) -> None:
        """Let nothing that asks for the disk get an answer from now on."""
        self.wedged = True

    def collide(self) -> None:
        """Wedge the disk over an evict under a prefetch, where this is LMCache 0.4.4.

        Raises ObservedError then; its text is as empty as that of a failed assertion.
        """
        if self.observed:
            self.wedge()
            raise ObservedError

    async def pass_through(self) -> None:
        """Return at once, without giving way to others, or take the whole port along for ever."""
        if self.wedged:
            self.port_hangs = True
            await trio.sleep_forever()
