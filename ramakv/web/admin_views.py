"""What the page shows of one session, and what a search finds."""

from __future__ import annotations

from itertools import islice
from typing import Final

import trio
from msgspec import Struct

from ramakv.actors.places import Place
from ramakv.actors.requests import Look
from ramakv.actors.turns import Turn
from ramakv.config import DISK_LOCATION, HOT_LOCATION
from ramakv.core.session import SessionState
from ramakv.errors import BackendError, UnavailableError
from ramakv.web.operable import Operable
from ramakv.web.snapshot import SessionRow
from ramakv.web.toplists import row_of

CHUNKS_MAX: Final = 4096
"""Most chunks of a map that are shown, and that LMCache is asked about at once."""
_ASK_SECONDS_MAX: Final = 3.0
_LOCATED_SECONDS: Final = 5.0
_LOCATED_SESSIONS_MAX: Final = 64
_FORKS_MAX: Final = 100
_FOUND_MAX: Final = 50
_SLICE: Final = 2000

_LETTERS: Final = {HOT_LOCATION: "h", DISK_LOCATION: "d"}


class ForkView(Struct):
    """An open fork."""

    id: int
    opened_ms: int
    chunks: int


class SessionView(Struct):
    """One session's own page. Chunks are columns, as long as `hashes`: so they are small."""

    session: SessionRow
    pinned: bool
    seq: int | None
    hashes: list[str]
    """The first of its map, up to a bound; `session.chunks` says how many there are."""
    references: list[int]
    """Of each: by sessions and forks, this one included."""
    places: str
    """Of each a letter: h(ot), d(isk), o(ther tier), m(issing), ? (not known)."""
    places_trouble: str
    """Why places are not known; empty where they are."""
    forks: list[ForkView]
    """The latest, the newest first; `session.forks` says how many there are."""
    turns: list[Turn]


class Found(Struct):
    """What a search found."""

    sessions: list[SessionRow]
    more: bool
    chunk: str = ""
    """The hash that was looked for, where it is one that is referenced."""
    references: int = 0
    holders: list[SessionRow] = []
    """Awake sessions that hold it. Others may: sessions asleep, and forks."""


class Views:
    """Looks at single sessions and chunks for operators, one LMCache question per session and
    few seconds, however many look.
    """

    def __init__(self, service: Operable) -> None:
        self._service = service
        self._located: dict[str, tuple[float, tuple[str, ...], str, str]] = {}

    async def session(self, session_id: str) -> SessionView:
        """Look at one session. Raises NotFoundError, UnavailableError or StoreError."""
        router, refcount = self._service.router, self._service.refcount
        place = router.place(session_id)
        state = await self._look(place)
        hashes = state.chunk_map[:CHUNKS_MAX]
        counts = refcount.counts_of(hashes)
        places, trouble = await self._locate(session_id, hashes)
        return SessionView(
            session=row_of(place),
            pinned=state.pinned,
            seq=state.seq,
            hashes=list(hashes),
            references=[counts[chunk] for chunk in hashes],
            places=places,
            places_trouble=trouble,
            forks=[
                ForkView(fork.fork_id, fork.opened_ms, len(fork.chunks))
                for fork in state.forks[: -_FORKS_MAX - 1 : -1]
            ],
            turns=list(router.turns.of(session_id)),
        )

    async def _look(self, place: Place) -> SessionState:
        with trio.move_on_after(_ASK_SECONDS_MAX):
            state = await self._service.router.ask_quietly(place, Look()).wait()
            assert isinstance(state, SessionState)
            return state
        raise UnavailableError(
            f"session '{place.session_id}' has no time to answer; try again in a moment"
        )

    async def _locate(self, session_id: str, hashes: tuple[str, ...]) -> tuple[str, str]:
        """Say where chunks lie, a letter for each, and why not where that is not known."""
        if not hashes:
            return "", ""
        now = trio.current_time()
        known = self._located.get(session_id)
        if known and known[0] + _LOCATED_SECONDS > now and known[1] == hashes:
            return known[2], known[3]
        size = min(self._service.config.backend.chunks_per_call_max, len(hashes))
        trouble, letters = "", ""
        try:
            answer = None
            with trio.move_on_after(_ASK_SECONDS_MAX) as waited:
                answer = await self._service.backend.locate(hashes[:size]).wait()
            if waited.cancelled_caught:
                trouble = "LMCache has not answered yet"
            elif answer is None:
                trouble = "this LMCache cannot tell where chunks lie"
            else:
                letters = "".join(_letter(answer.get(chunk, [])) for chunk in hashes[:size])
        except BackendError as error:
            trouble = str(error)
        letters += "?" * (len(hashes) - len(letters))
        self._located.pop(session_id, None)
        self._located[session_id] = (now, hashes, letters, trouble)
        while len(self._located) > _LOCATED_SESSIONS_MAX:
            del self._located[next(iter(self._located))]
        return letters, trouble

    async def search(self, text: str) -> Found:
        """Find sessions whose id has the text, and, where it is a chunk's hash, who holds it."""
        router, refcount = self._service.router, self._service.refcount
        found: list[Place] = []
        exact, folded = [], text.casefold()
        places = router.places()
        for start in range(0, len(places), _SLICE):
            for place in places[start : start + _SLICE]:
                if place.session_id == text:
                    exact.append(place)
                elif len(found) < _FOUND_MAX + 1 and folded in place.session_id.casefold():
                    found.append(place)
            await trio.lowlevel.checkpoint()
        found = [*exact, *found]
        rows = [row_of(place) for place in found[:_FOUND_MAX] if not place.is_empty]
        references = refcount.counts_of((text,))[text]
        if not references:
            return Found(rows, len(found) > _FOUND_MAX)
        holders = await self._holders(text)
        return Found(rows, len(found) > _FOUND_MAX, text, references, holders)

    async def _holders(self, chunk: str) -> list[SessionRow]:
        holders: list[Place] = []
        for number, place in enumerate(reversed(self._service.router.awake())):
            if place.actor is not None and chunk in place.actor.references:
                holders.append(place)
            if number % 20 == 19:
                await trio.lowlevel.checkpoint()
        return [row_of(place) for place in islice(holders, _FOUND_MAX)]


def _letter(locations: list[str]) -> str:
    """The quickest place of a chunk."""
    letters = [_LETTERS.get(location, "o") for location in locations]
    return next((letter for letter in "hdo" if letter in letters), "m")
