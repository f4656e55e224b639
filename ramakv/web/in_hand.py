"""How much of what clients send, and are sent, is in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ramakv.errors import UnavailableError

FREE_BYTES: Final = 64 * 1024
"""What each request may take without being counted: whoever sends little is never refused."""


class BytesInHand:
    """The bytes of all large requests and answers, and the most that they may be."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """Count one request, from the first byte of its body to the last of its answer."""
        share = Share(self)
        try:
            yield share
        finally:
            self.total -= share.counted

    def has_room(self, size: int, share: Share) -> bool:
        """Whether so many bytes more are not too many; to one request alone they never are."""
        return self.total + size <= self.most or self.total == share.counted


class Share:
    """What one request has of them."""

    def __init__(self, whole: BytesInHand) -> None:
        self._whole = whole
        self._size = 0
        self.counted = 0

    def grow(self, size: int, *, may_refuse: bool = True) -> None:
        """Take more. Raises UnavailableError where that is too much for the daemon."""
        more = max(0, self._size + size - FREE_BYTES) - self.counted
        if more > 0:
            if may_refuse and not self._whole.has_room(more, self):
                raise UnavailableError(
                    "too many large requests and answers are in hand "
                    f"(limits.in_hand_bytes_max, {self._whole.most}); nothing was changed"
                )
            self._whole.total += more
            self.counted += more
        self._size += size
