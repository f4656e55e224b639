"""Clients that were refused come back one at a time.

A turn of the event loop runs every task that can. An event passes from actor to actor and needs
about ten turns, so hundreds of clients that ask again the moment they had a 503 would make each
turn long, and stop everybody's work, their own included. Whoever waits as long as `Retry-After`
says does not notice any of this.
"""

from __future__ import annotations

import trio


class Turnstile:
    """Lets one refused client a turn go on, in their order."""

    def __init__(self) -> None:
        self._waiting = trio.lowlevel.ParkingLot()
        self._keeper = trio.lowlevel.ParkingLot()

    async def enter(self) -> None:
        """Wait for one's turn."""
        self._keeper.unpark()
        await self._waiting.park()

    async def run(self) -> None:
        """Let those in who wait, until cancelled."""
        while True:
            if self._waiting:
                await trio.lowlevel.checkpoint()  # the next turn
            else:
                await self._keeper.park()
            self._waiting.unpark()
