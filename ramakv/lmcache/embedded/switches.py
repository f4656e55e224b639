"""What operators switch at run time: freeze, the hot cache, bypassed backends. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ramakv.config import HOT_LOCATION


class Switches:
    """Which locations may be read and written now."""

    def __init__(self, locations: Iterable[str]) -> None:
        """Start with everything on."""
        self.locations = tuple(locations)
        self.frozen = False
        self.hot_cache = True
        self._bypassed: dict[str, None] = {}

    @property
    def bypassed(self) -> list[str]:
        """The bypassed locations, in the order they were added."""
        return list(self._bypassed)

    def bypass(self, location: str) -> bool:
        """Leave a location out. Return whether it was left out already."""
        was = location in self._bypassed
        self._bypassed[location] = None
        return was

    def restore(self, location: str) -> bool:
        """Take a location in again. Return whether it was left out."""
        was = location in self._bypassed
        self._bypassed.pop(location, None)
        return was

    def readable(self, location: str) -> bool:
        """Say whether chunks are looked for there: when frozen, in the hot tier only."""
        if location in self._bypassed:
            return False
        return location == HOT_LOCATION or not self.frozen

    def writable(self, location: str) -> bool:
        """Say whether a store puts chunks there: when frozen, nowhere."""
        return not self.frozen and self.admits(location)

    def admits(self, location: str) -> bool:
        """Say whether a chunk that was read elsewhere may enter."""
        if location in self._bypassed:
            return False
        return location != HOT_LOCATION or (self.hot_cache and not self.frozen)
