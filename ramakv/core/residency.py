"""Residency: which sessions' chunks stay in LMCache's hot tier while their agents are away.

LMCache admits every chunk and lets the ones used longest ago go. Where the sessions do not all
fit, each one's chunks are gone just before it comes back. So some are kept whole instead: those
whose chunks yield most hits for the time they stay (see `pauses`). What that takes from outside:

* **bring up** a session's chunks during its pause, when it is likely to come back soon;
* **renew** those of a resident before their turn to go comes;
* **demote** a session of which nothing is to be hoped: its room is free at once.

Decisions are made on samples of the sessions' chunks, and on a shadow of the tier as these
decisions drive it. Plain LRU runs beside it in another shadow; under the policy `auto`, what is
decided is done only while it does better than LRU (see `duel`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Literal

from ramakv.core.attention import Attention
from ramakv.core.candidates import Candidate, Standing, standing
from ramakv.core.chunks import ChunkHash, ChunkMap
from ramakv.core.duel import Duel
from ramakv.core.leavings import Leavings
from ramakv.core.orders import ALL, Action, Advice, Order
from ramakv.core.pauses import Pauses, Reason, ends_at, reason_of, step_of
from ramakv.core.shadow import ShadowTier, sample_of, sampling_of
from ramakv.core.tallies import HotTallies

Policy = Literal["off", "sticky", "auto"]

CANDIDATES_MAX = 4096
"""Sessions that are thought about: those whose turns ended last."""

_RESERVE = 0.15
"""Share of the tier that is left to turns as they come."""

_MISFITS_MAX = 16
"""After so many sessions that do not fit, the room is taken for full."""

_LOST_SHARE_MAX = 0.2
"""A session of which more than this is not hot is brought up; less is not worth a call."""

_HOPELESS = 0.05
"""What yields less than this share of what the least of the residents does, is demoted."""

_WINDOW = 0.2
"""Share of the room beside the residents that is looked over, once one of them must be renewed."""

_LEFT_OVER_MAX = 2.0
"""Of the sessions that might have been brought up and were not, so many may be later."""

_LOOKED_AT, _LOOKED_AT_MIN = 2, 64
"""Of those who pause, so many times as many are looked at again as are chosen, and some more."""

_TOLD_SECONDS = (5, 20, 60, 600)


@dataclass
class Residency:
    """What is known of the sessions, who is in, and the two shadows of the tier.

    Times are seconds on one clock. Everything is in memory: after a restart it is told of the
    sessions again, the one used longest ago first.
    """

    capacity: int
    """Chunks that LMCache's hot tier holds."""
    policy: Policy
    duel: Duel = field(default_factory=Duel)
    hot: HotTallies = field(default_factory=HotTallies)
    bring_ups_per_turn: float = 0.6
    """Sessions that may be brought up for each turn: the disk has turns to serve as well."""
    demotes: bool = True
    """Whether a slower tier keeps what is taken out of this one; else nothing is."""
    leavings: Leavings = field(default_factory=Leavings)
    _one_of: int = field(init=False)
    _lru: ShadowTier = field(init=False)
    _driven: ShadowTier = field(init=False)
    _pauses: dict[Reason, Pauses] = field(init=False)
    _sessions: OrderedDict[str, Candidate] = field(init=False)
    _attention: Attention = field(default_factory=Attention)
    _turns: int = 0
    _turns_before: int = 0
    _may_bring_up: float = 0.0
    _turn_seconds: float = 8.0
    _displaced: float = 0.0
    _displaced_before: int = 0

    def __post_init__(self) -> None:
        self._one_of = sampling_of(self.capacity)
        self._lru = ShadowTier(self.capacity // self._one_of)
        self._driven = ShadowTier(self.capacity // self._one_of)
        self._pauses = {reason: Pauses() for reason in ("tool", "end", "other", "unknown")}
        self._sessions = OrderedDict()

    @property
    def is_in_force(self) -> bool:
        """Whether what is decided is to be done."""
        return self.policy == "sticky" or (self.policy == "auto" and self.duel.challenger_leads)

    # What happens ------------------------------------------------------------------------

    def turn_started(self, session_id: str, now: float) -> Advice:
        """Note that a session's turn begins: its chunks are used. Returns what to prefetch now."""
        session = self._sessions.get(session_id)
        if session is None:  # its turn is open all the same
            session = self._add(Candidate(session_id, is_running=True))
        if not session.is_running:
            pauses, step = self._pauses[session.reason], step_of(now - session.since)
            pauses.lasted(session.step, step)
            pauses.ended(step)
            self._count_hits(session)
        advice = self._advice_for(session)
        session.is_running, session.since, session.brought_up = True, now, 0.0
        session.is_in = session.is_demoted = session.is_prefetched = False
        self._attention.draw(session)
        self._use(session.sample)
        return advice

    def turn_ended(
        self, session_id: str, chunks: ChunkMap, finish_reason: str | None, now: float
    ) -> None:
        """Note that a turn ended, and left the session with these chunks."""
        session = self._sessions.pop(session_id, None) or Candidate(session_id)
        before, same = session.members, len(session.chunk_map)
        if chunks[:same] == session.chunk_map:  # mostly: then only what is new is looked through
            new = sample_of(chunks[same:], self._one_of)
            session.sample = [*session.sample, *new]
        else:
            session.sample = sample_of(chunks, self._one_of)
            new = [chunk for chunk in session.sample if chunk not in before]
        session.members = frozenset(session.sample)
        self.leavings.wanted(new, self._lru)
        if session.chunk_map:
            session.began_anew = self.leavings.continued(session.chunk_map, chunks)
            self.leavings.released(before - session.members)
        else:
            self._count_hits(session)
        session.chunk_map = chunks
        if session.is_running:
            self._turn_seconds += 0.02 * (now - session.since - self._turn_seconds)
        self._use(new)
        session.is_running, session.is_in, session.is_demoted = False, False, False
        session.is_fresh = True
        self._turns += 1
        session.last_turn = self._turns
        session.since, session.reason = now, reason_of(finish_reason)
        session.step, session.step_ends = 0, now + ends_at(0)
        self._add(session)

    def inherited(self, session_id: str) -> None:
        """Note that a session begins with another's map: how much of it is for it, is unknown.

        What it shares with the other one is as hot as that keeps it.
        """
        if self.is_unknown(session_id):
            self._add(Candidate(session_id, is_running=True, began_anew=True))

    def left(self, session_id: str) -> None:
        """Note that a session was closed or suspended: its chunks are none of ours any more."""
        if (session := self._sessions.pop(session_id, None)) is not None:
            self._attention.forget(session)

    def _advice_for(self, session: Candidate) -> Advice:
        is_there = session.is_prefetched and self._is_whole(session)
        if self.policy != "auto":
            return Advice(is_there)
        return Advice(is_there, ALL if session.began_anew else self.leavings.unwanted_end)

    def prefetched(self, session_id: str) -> None:
        """Note that LMCache accepted a prefetch of a session's chunks."""
        if (session := self._sessions.get(session_id)) is not None:
            session.is_prefetched = not session.is_running

    def failed(self, order: Order) -> None:
        """Note that a session was not brought up after all."""
        session = self._sessions.get(order.session_id)
        if session is not None and order.action is Action.BRING_UP and not session.is_running:
            session.is_in = False
            self._driven.drop(session.sample)

    def map_of(self, session_id: str) -> ChunkMap:
        """What a session's last turn left it; nothing where that is not known."""
        session = self._sessions.get(session_id)
        return () if session is None else session.chunk_map

    @property
    def leaves_released(self) -> bool:
        """Whether LRU is to take what turns released, and no evict."""
        return self.policy == "auto" and self.leavings.come_back

    def is_in_turn(self, session_id: str) -> bool:
        """Whether a session is in a turn, as far as is known: then nothing is done with it."""
        session = self._sessions.get(session_id)
        return session is None or session.is_running

    def last_turn_of(self, session_id: str) -> int:
        """A number that tells a session's last turn from all others; 0 where it had none yet."""
        session = self._sessions.get(session_id)
        return 0 if session is None else session.last_turn

    def is_unknown(self, session_id: str) -> bool:
        """Whether nothing was heard of a session yet."""
        return session_id not in self._sessions

    def _add(self, session: Candidate) -> Candidate:
        self._sessions[session.session_id] = session
        self._attention.draw(session)
        if len(self._sessions) > CANDIDATES_MAX:
            _, oldest = self._sessions.popitem(last=False)
            self._attention.forget(oldest)
        return session

    def _count_hits(self, session: Candidate) -> None:
        wanted = len(session.sample)
        if not wanted:
            return
        lru, driven = self._lru.hits(session.sample), self._driven.hits(session.sample)
        hot = driven if self.is_in_force else lru
        session.hot_share = hot / wanted
        self.hot.wanted += wanted * self._one_of
        self.hot.hot += hot * self._one_of
        was_in_force = self.is_in_force
        self.duel.note(wanted, lru, driven)
        if self.is_in_force and not was_in_force:
            self._driven.become(self._lru)  # so far, that was what drove the tier

    def _use(self, sample: Sequence[ChunkHash]) -> None:
        self._lru.use(sample)
        self._driven.use(sample)

    # Decisions ---------------------------------------------------------------------------

    def decide(self, now: float) -> list[Order]:
        """Choose who stays, and return what is to be done for that: nothing, if not in force."""
        for pauses in self._pauses.values():
            pauses.learn(self._turn_seconds)
        ranked = self._rank(now)
        chosen, kept, price = self._choose(ranked)
        orders = [*self._demote(ranked, chosen, kept, price)]
        orders += self._bring_up(chosen, now)
        orders += self._renew(chosen, kept)
        best = {session for _, session in ranked[: _LOOKED_AT * len(chosen) + _LOOKED_AT_MIN]}
        self._attention.set_aside(self._pauses, best, price)
        self._displaced += 0.2 * (self._driven.displaced - self._displaced_before - self._displaced)
        self._displaced_before = self._driven.displaced
        return orders if self.is_in_force else []

    def _rank(self, now: float) -> list[tuple[float, Candidate]]:
        """Those of whom hits are to be expected, the best first; ages the pauses."""
        ranked = []
        for session in self._attention.look(now, self._sessions.values()):
            pauses = self._pauses[session.reason]
            if session.is_running:
                worth = pauses.while_running
            else:
                if now >= session.step_ends:
                    step = step_of(now - session.since)
                    pauses.lasted(session.step, step)
                    session.step, session.step_ends = step, session.since + ends_at(step)
                # Just after its turn a session's chunks are hot, whoever is in.
                is_hot = session.is_in or session.is_fresh
                worth = (pauses.to_keep if is_hot else pauses.to_load)[session.step]
            if worth > 0:
                ranked.append((worth, session))
        ranked.sort(key=itemgetter(0), reverse=True)
        return ranked

    def _choose(
        self, ranked: Iterable[tuple[float, Candidate]]
    ) -> tuple[list[Candidate], set[ChunkHash], float]:
        """Fill the room with the best; chunks that sessions share count once.

        Returns the ones that pause, their chunks, and the least that one of them yields, 0 where
        there is room for all. Sessions in a turn take room and are left alone: LMCache has just
        used their chunks.
        """
        room = int(self._driven.capacity * (1 - _RESERVE))
        taken: set[ChunkHash] = set()
        kept: set[ChunkHash] = set()
        chosen: list[Candidate] = []
        misfits, price = 0, 0.0
        for worth, session in ranked:
            new = session.members - taken
            if len(taken) + len(new) > room:
                misfits += 1
                if misfits == _MISFITS_MAX:
                    break
                continue
            taken |= new
            if not session.is_running:
                chosen.append(session)
                kept |= session.members
                price = worth
        return chosen, kept, price if misfits else 0.0

    def _demote(
        self,
        ranked: Iterable[tuple[float, Candidate]],
        chosen: Iterable[Candidate],
        kept: set[ChunkHash],
        price: float,
    ) -> Iterator[Order]:
        """Let go of who is not chosen; out goes who is far from it."""
        stays = {session.session_id for session in chosen}
        for worth, session in ranked:
            if session.is_running or session.session_id in stays:
                continue
            session.is_in = session.is_fresh = False
            if self.demotes and worth < _HOPELESS * price and not session.is_demoted:
                session.is_demoted = True
                goes = session.members - kept
                if self._driven.missing(goes) < len(goes):
                    self._driven.drop(goes)
                    yield Order(Action.DEMOTE, session.session_id)

    def _is_whole(self, session: Candidate) -> bool:
        """Whether so little of it is not hot that it is not worth a call."""
        lost = self._driven.missing(session.members)
        return lost <= _LOST_SHARE_MAX * len(session.sample)

    def _bring_up(self, chosen: Iterable[Candidate], now: float) -> Iterator[Order]:
        turns, self._turns_before = self._turns - self._turns_before, self._turns
        left_over = min(self._may_bring_up, _LEFT_OVER_MAX)
        self._may_bring_up = left_over + self.bring_ups_per_turn * turns
        for session in chosen:
            if self._is_whole(session):
                session.is_in, session.is_fresh = True, False
            elif self._may_bring_up >= 1:
                self._may_bring_up -= 1
                session.is_in, session.is_demoted, session.is_fresh = True, False, False
                session.brought_up = now
                self._driven.load(session.sample)
                yield Order(Action.BRING_UP, session.session_id)
            else:
                session.is_in = False

    def _renew(self, chosen: Iterable[Candidate], kept: set[ChunkHash]) -> Iterator[Order]:
        """Renew residents of which chunks would soon be the next to go.

        A prefetch of several sessions renews up to the first chunk that is not hot. So first
        come those who were not brought up in this pause, then those who were long ago.
        """
        soon = int(2 * self._displaced) + 1
        if kept.isdisjoint(self._driven.next_to_go(soon)):
            return
        beside = max(0, self._driven.capacity - len(kept))
        next_to_go = set(self._driven.next_to_go(soon + int(_WINDOW * beside)))
        due = [
            (self._driven.missing(session.members) > 0, session.brought_up, session)
            for session in chosen
            if session.is_in and not session.members.isdisjoint(next_to_go)
        ]
        for _, _, session in sorted(due, key=itemgetter(0, 1)):
            self._driven.renew(session.sample)
            yield Order(Action.RENEW, session.session_id)

    # For people --------------------------------------------------------------------------

    @property
    def hot_share(self) -> float:
        """Of the chunks that turns of late wanted, those that were hot, as far as can be told."""
        return self.duel.challenger_share if self.is_in_force else self.duel.lru_share

    def learned(self) -> dict[Reason, dict[str, float]]:
        """For each reason why turns stop: the share of pauses that are over by then."""
        return {
            reason: {f"{seconds}s": pauses.share_ended_by(seconds) for seconds in _TOLD_SECONDS}
            for reason, pauses in self._pauses.items()
        }

    def standings(self, now: float, count: int) -> list[Standing]:
        """How the sessions stand whose turns ended last, the last one first."""
        latest = islice(reversed(self._sessions.values()), count)
        return [standing(session, self._pauses[session.reason], now) for session in latest]

    def residents(self) -> int:
        """How many sessions are in."""
        return sum(session.is_in for session in self._sessions.values())

    def __len__(self) -> int:
        """How many sessions are thought about."""
        return len(self._sessions)
