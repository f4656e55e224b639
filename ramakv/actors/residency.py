"""The residency actor: tells LMCache, between turns, whose chunks to keep hot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog
import trio

from ramakv.actors.backend import BackendActor
from ramakv.actors.errands import ERRAND_SECONDS, Errand
from ramakv.actors.mailbox import Reply
from ramakv.actors.places import Place
from ramakv.actors.requests import Look, Outcome, Request
from ramakv.config import Residency as ResidencyConfig
from ramakv.core.chunks import ChunkMap
from ramakv.core.residency import CANDIDATES_MAX, Action, Order, Policy, Residency, Standing
from ramakv.core.session import SessionState, Status
from ramakv.core.tallies import HotTallies
from ramakv.errors import RamakvError

log = structlog.get_logger("ramakv.residency")

DECIDE_SECONDS = 1.5
"""How often it is decided who stays."""

_LOOK_SECONDS = 1.0
"""How long one decision may wait for sessions to say what they hold."""

_ASK_AGAIN_SECONDS = 30.0
"""How often an LMCache that did not say what it is like is asked again."""


class HotTier(Protocol):
    """What is known of LMCache's hot tier."""

    @property
    def chunks_max(self) -> int:
        """Chunks that it holds."""

    @property
    def obstacle(self) -> str:
        """Why residency must not act on it; empty where it may."""

    @property
    def has_slower_tier(self) -> bool:
        """Whether a chunk that leaves it is somewhere yet."""


class Sessions(Protocol):
    """The router, as far as residency knows it."""

    def places(self) -> Sequence[Place]:
        """All sessions, as they are now."""

    def place(self, session_id: str) -> Place:
        """One session. Raises NotFoundError."""

    def ask_quietly(self, place: Place, request: Request) -> Reply[Outcome]:
        """Ask a session what is no event. Raises UnavailableError."""


def _switched_off(config: ResidencyConfig) -> str:
    if config.policy == "off":
        return "residency.policy is off"
    if config.hot_chunks_max == 0:
        return "residency.hot_chunks_max is 0; set it to 'auto', or to what the hot tier holds"
    return ""


class ResidencyActor:
    """Listens to the turns, and now and then does what the policy makes of them.

    **Owns** the policy's state. **Is told** of turns by the session actors, synchronously, so
    that nothing is ever done with a session whose turn is open. **Asks** sessions for their
    maps. **Sends to** the backend's last lane. **Stops when** it is closed, at once: what it
    wants is worth nothing later.
    """

    def __init__(
        self,
        config: ResidencyConfig,
        hot_tier: Callable[[], Awaitable[HotTier]],
        backend: BackendActor,
    ) -> None:
        self.policy: Policy = config.policy
        self.why_off = _switched_off(config)
        """Why nothing is done; empty where something is, or is about to be."""
        self._hot_tier = hot_tier
        self._backend = backend
        self._sessions: Sessions | None = None
        self._rules: Residency | None = None
        self._scope = trio.CancelScope()
        self.done = dict.fromkeys(Action, 0)
        """Errands that LMCache accepted."""
        self.hot = HotTallies()

    def connect(self, sessions: Sessions) -> None:
        """Take the router, which is made after this."""
        self._sessions = sessions

    @property
    def rules(self) -> Residency | None:
        """The policy and its state; None while residency is off."""
        return self._rules

    # Told by session actors ---------------------------------------------------------------

    def turn_started(self, session_id: str) -> None:
        """Note that a turn begins, before anything is done for it."""
        if self._rules is not None:
            self._rules.turn_started(session_id, trio.current_time())

    def turn_ended(self, session_id: str, chunks: ChunkMap, finish_reason: str | None) -> None:
        """Note that a turn's end was applied."""
        if self._rules is not None:
            self._rules.turn_ended(session_id, chunks, finish_reason, trio.current_time())

    def left(self, session_id: str) -> None:
        """Note that a session is not active any more."""
        if self._rules is not None:
            self._rules.left(session_id)

    # Its own task --------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Decide and do, again and again, until closed."""
        task_status.started()
        if self.why_off:
            return
        with self._scope:
            tier = await self._look_at_tier()
            if tier is None:
                return
            demotes = tier.has_slower_tier
            self._rules = Residency(tier.chunks_max, self.policy, hot=self.hot, demotes=demotes)
            self.why_off = ""
            log.info("residency", policy=self.policy, hot_chunks_max=tier.chunks_max)
            await self._rebuild(self._rules)
            while True:
                await trio.sleep(DECIDE_SECONDS)
                await self._do(self._rules, self._rules.decide(trio.current_time()))

    def close(self) -> None:
        """End `run`."""
        self._scope.cancel()

    async def _look_at_tier(self) -> HotTier | None:
        """Find out what LMCache holds; None where residency has to stay off."""
        while True:
            try:
                tier = await self._hot_tier()
            except RamakvError as error:
                self.why_off = f"LMCache does not say what its hot tier holds: {error}"
                log.warning("residency waits for LMCache", cause=str(error))
                await trio.sleep(_ASK_AGAIN_SECONDS)
                continue
            if tier.obstacle:
                self.why_off = tier.obstacle
                log.warning("residency stays off", cause=tier.obstacle)
                return None
            return tier

    async def _rebuild(self, rules: Residency) -> None:
        """Tell the policy of the sessions that were there before: the last used ones, in order."""
        assert self._sessions is not None
        active = [place for place in self._sessions.places() if place.status is Status.ACTIVE]
        active.sort(key=lambda place: place.last_event, reverse=True)
        room, recent = float(rules.capacity), []
        for place in active[:CANDIDATES_MAX]:
            room -= place.chunks
            if room < 0:
                break
            recent.append(place)
        for place in reversed(recent):
            chunks = await self._map_of(place.session_id)
            if chunks and rules.is_unknown(place.session_id):
                rules.turn_ended(place.session_id, chunks, None, place.last_event)

    async def _do(self, rules: Residency, orders: Sequence[Order]) -> None:
        """Give the backend an errand for each order; renewals go together."""
        renewed: dict[str, ChunkMap] = {}
        with trio.move_on_after(_LOOK_SECONDS):
            for order in orders:
                chunks = await self._map_of(order.session_id)
                if not chunks:
                    rules.failed(order)
                elif order.action is Action.RENEW:
                    renewed[order.session_id] = chunks
                else:
                    self._send(rules, order.action, {order.session_id: chunks}, order)
        if renewed:
            self._send(rules, Action.RENEW, renewed, None)

    def _send(
        self, rules: Residency, action: Action, parts: dict[str, ChunkMap], order: Order | None
    ) -> None:
        last_turns = {session_id: rules.last_turn_of(session_id) for session_id in parts}

        def stands(session_id: str) -> bool:
            is_paused = not rules.is_in_turn(session_id)
            return is_paused and rules.last_turn_of(session_id) == last_turns[session_id]

        def note(accepted: bool) -> None:
            self.done[action] += accepted
            if not accepted and order is not None:
                rules.failed(order)

        deadline = trio.current_time() + ERRAND_SECONDS
        self._backend.run_errand(Errand(action, parts, stands, deadline, note))

    async def _map_of(self, session_id: str) -> ChunkMap:
        """What a session holds; nothing where it cannot say."""
        assert self._sessions is not None
        try:
            place = self._sessions.place(session_id)
            state = await self._sessions.ask_quietly(place, Look()).wait()
        except RamakvError:
            return ()
        assert isinstance(state, SessionState)
        return state.references if state.status is Status.ACTIVE else ()

    # For people ------------------------------------------------------------------------------

    def standings(self, count: int) -> Sequence[Standing]:
        """How the sessions stand whose turns began or ended last, so many at most."""
        if self._rules is None:
            return ()
        return self._rules.standings(trio.current_time(), count)
