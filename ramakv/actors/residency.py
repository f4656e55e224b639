"""The residency actor: tells LMCache, between turns, whose chunks to keep hot."""

from __future__ import annotations

import math
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
from ramakv.core.candidates import Standing
from ramakv.core.chunks import ChunkMap, distinct
from ramakv.core.orders import Action, Advice, Order
from ramakv.core.residency import CANDIDATES_MAX, Policy, Residency
from ramakv.core.session import SessionState, Status
from ramakv.core.tallies import HotTallies
from ramakv.errors import RamakvError

log = structlog.get_logger("ramakv.residency")

DECIDE_SECONDS = 0.8
"""How often it is decided who stays, at the first turn's end after so long: a daemon that is awake
does it at half the cost, and nobody waits for it then."""

QUIET_SECONDS = 2.0
"""The same where no turn ends."""

DECIDE_FOR_NOTHING_SECONDS = 4.0
"""The same while LRU does better, and decisions only show what would be."""

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
        self._bring_ups_per_turn = config.bring_ups_per_turn
        self._hot_tier = hot_tier
        self._backend = backend
        self._sessions: Sessions | None = None
        self._rules: Residency | None = None
        self._scope = trio.CancelScope()
        self._due = trio.Event()
        self._due_at = math.inf
        self.done = dict.fromkeys(Action, 0)
        """For how many sessions LMCache accepted it."""
        self.hot = HotTallies()

    def connect(self, sessions: Sessions) -> None:
        """Take the router, which is made after this."""
        self._sessions = sessions

    @property
    def rules(self) -> Residency | None:
        """The policy and its state; None while residency is off."""
        return self._rules

    # Told by session actors ---------------------------------------------------------------

    def turn_started(self, session_id: str) -> Advice:
        """Note that a turn begins, before anything is done for it. Returns what to prefetch."""
        if self._rules is None:
            return Advice()
        return self._rules.turn_started(session_id, trio.current_time())

    def turn_ended(self, session_id: str, chunks: ChunkMap, finish_reason: str | None) -> None:
        """Note that a turn's end was applied."""
        if self._rules is not None:
            now = trio.current_time()
            self._rules.turn_ended(session_id, distinct(chunks), finish_reason, now)
            if now >= self._due_at:
                self._due.set()

    def inherited(self, session_id: str) -> None:
        """Note that a session begins with another's map."""
        if self._rules is not None:
            self._rules.inherited(session_id)

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
            self._rules = Residency(
                tier.chunks_max,
                self.policy,
                hot=self.hot,
                bring_ups_per_turn=self._bring_ups_per_turn,
                demotes=tier.has_slower_tier,
            )
            self.why_off = ""
            log.info("residency", policy=self.policy, hot_chunks_max=tier.chunks_max)
            await self._rebuild(self._rules)
            while True:
                self._backend.leave_released(self._rules.leaves_released)
                await self._next_decision(self._rules.is_in_force)
                self._do(self._rules, self._rules.decide(trio.current_time()))

    async def _next_decision(self, in_force: bool) -> None:
        """Wait until the next one is due, and then for the end of a turn, but not for long."""
        self._due = trio.Event()
        now = trio.current_time()
        self._due_at = now + (DECIDE_SECONDS if in_force else DECIDE_FOR_NOTHING_SECONDS)
        with trio.move_on_at(self._due_at + QUIET_SECONDS - DECIDE_SECONDS):
            await self._due.wait()

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

    def _do(self, rules: Residency, orders: Sequence[Order]) -> None:
        """Give the backend errands for these orders.

        A call costs more than what it names, so all renewals are one, and the first session that
        is brought up goes along with them, behind what is there already.
        """
        of: dict[Action, list[Order]] = {action: [] for action in Action}
        for order in orders:
            of[order.action].append(order)
        for order in of[Action.DEMOTE] + of[Action.BRING_UP][1:]:
            self._send(rules, [order])
        if together := of[Action.RENEW] + of[Action.BRING_UP][:1]:
            self._send(rules, together)

    def _send(self, rules: Residency, orders: Sequence[Order]) -> None:
        """Give the backend one errand for all of these, which are of one kind: up, or out."""
        parts = {order.session_id: rules.map_of(order.session_id) for order in orders}
        last_turns = {session_id: rules.last_turn_of(session_id) for session_id in parts}

        def stands(session_id: str) -> bool:
            is_paused = not rules.is_in_turn(session_id)
            return is_paused and rules.last_turn_of(session_id) == last_turns[session_id]

        def note(accepted: bool) -> None:
            for order in orders:
                self.done[order.action] += accepted
                if not accepted:
                    rules.failed(order)
                elif order.action is not Action.DEMOTE and stands(order.session_id):
                    rules.prefetched(order.session_id)

        deadline = trio.current_time() + ERRAND_SECONDS
        self._backend.run_errand(Errand(orders[0].action, parts, stands, deadline, note))

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
