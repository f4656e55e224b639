"""The residency rules, without a daemon: who stays, and what is ordered for that."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from ramakv.core.candidates import Seat
from ramakv.core.duel import Duel
from ramakv.core.orders import Action, Order
from ramakv.core.residency import CANDIDATES_MAX, Policy, Residency
from ramakv.core.shadow import ShadowTier


def chunks_of(session_id: str, count: int = 10) -> list[str]:
    return [f"{session_id}-{number}" for number in range(count)]


class Engine:
    """Plain LRU, driven by what is ordered, as LMCache is."""

    def __init__(self, capacity: int, policy: Policy) -> None:
        self.rules = Residency(capacity, policy)
        self.tier = ShadowTier(capacity)
        self.now = 0.0
        self.wanted = self.hot = 0
        self.orders: list[Order] = []
        self.maps: dict[str, list[str]] = {}

    def turn(
        self,
        session_id: str,
        chunks: list[str],
        *,
        seconds: float = 0.1,
        reason: str = "tool_calls",
    ) -> None:
        self.wanted += len(chunks)
        self.hot += self.tier.hits(chunks)
        self.rules.turn_started(session_id, self.now)
        self.tier.use(chunks)
        self.let_pass(seconds)
        self.rules.turn_ended(session_id, chunks, reason, self.now)
        self.maps[session_id] = chunks

    def let_pass(self, seconds: float) -> None:
        """Decide once a second, and do what is ordered."""
        end = self.now + seconds
        while int(self.now) + 1 <= end:
            self.now = float(int(self.now) + 1)
            for order in self.rules.decide(self.now):
                assert not self.rules.is_in_turn(order.session_id)
                self.orders.append(order)
                chunks = self.maps[order.session_id]
                match order.action:
                    case Action.BRING_UP:
                        self.tier.use(chunks)
                    case Action.RENEW:
                        self.tier.renew(chunks)
                    case Action.DEMOTE:
                        self.tier.drop(chunks)
        self.now = end

    @property
    def hot_share(self) -> float:
        return self.hot / self.wanted


def round_robin(engine: Engine, sessions: int, rounds: int) -> None:
    """More sessions than fit, each coming back after all others have had their turn."""
    for _ in range(rounds):
        for number in range(sessions):
            engine.turn(f"s{number}", chunks_of(f"s{number}"))
            engine.let_pass(0.9)


def test_where_lru_keeps_nobody_some_are_kept_whole() -> None:
    lru, sticky = Engine(100, "off"), Engine(100, "sticky")
    for engine in (lru, sticky):
        round_robin(engine, sessions=20, rounds=30)
    assert lru.hot_share == 0.0
    assert sticky.hot_share > 0.3
    assert lru.orders == []


def test_auto_begins_as_lru_and_follows_the_better_one() -> None:
    engine = Engine(100, "auto")
    assert not engine.rules.is_in_force
    round_robin(engine, sessions=20, rounds=30)
    assert engine.rules.is_in_force
    assert engine.hot_share > 0.2
    seats: set[Seat] = set()
    for number in range(20):
        engine.turn(f"s{number}", chunks_of(f"s{number}"))
        engine.let_pass(0.9)
        standings = engine.rules.standings(engine.now, 100)
        seats |= {row.seat for row in standings}
        assert engine.rules.residents() == sum(row.seat is Seat.IN for row in standings)
    assert seats >= {Seat.IN, Seat.OUT}


def test_auto_leaves_lru_alone_where_everything_fits() -> None:
    engine = Engine(1000, "auto")
    round_robin(engine, sessions=20, rounds=30)
    assert engine.orders == []
    assert engine.hot_share > 0.9


def test_auto_goes_back_to_lru_when_that_does_better() -> None:
    duel = Duel()
    for _ in range(300):
        duel.note(wanted=10, lru=1, challenger=5)
    assert duel.challenger_leads
    for _ in range(2000):
        duel.note(wanted=10, lru=6, challenger=5)
    assert not duel.challenger_leads
    assert duel.lead == pytest.approx(-0.1, abs=0.02)


def test_a_lead_that_few_turns_or_small_differences_show_is_none() -> None:
    early, small = Duel(), Duel()
    for _ in range(100):
        early.note(wanted=10, lru=0, challenger=10)
    for _ in range(1000):
        small.note(wanted=100, lru=50, challenger=51)
    assert not early.challenger_leads
    assert not small.challenger_leads


def test_a_lead_that_chance_would_explain_is_none() -> None:
    """A turn finds all or nothing: of 300 of them, three in a hundred more is not much."""
    lucky, better = Duel(), Duel()
    for _ in range(300):
        lucky.note(wanted=100, lru=20, challenger=23)
        better.note(wanted=100, lru=20, challenger=30)
    assert lucky.lead > 0.02
    assert not lucky.challenger_leads
    assert better.challenger_leads


def test_a_session_that_comes_back_like_clockwork_is_brought_up_before() -> None:
    """It is away for too long to be kept: others fill the tier in the meantime."""
    engine = Engine(60, "sticky")
    for _ in range(60):
        engine.turn("clock", chunks_of("clock"))
        for number in range(8):
            engine.let_pass(1)
            engine.turn(f"busy{number % 4}", chunks_of(f"busy{number % 4}", 18), seconds=0.01)
    assert engine.rules.is_in_force
    brought_up = {order.session_id for order in engine.orders if order.action is Action.BRING_UP}
    assert brought_up


def some_are_gone(engine: Engine) -> None:
    """Five sessions come back from their tools; others end now and then, and are not seen again."""
    for number in range(800):
        engine.turn(f"s{number % 5}", chunks_of(f"s{number % 5}", 14), seconds=0.5)
        engine.let_pass(0.5)
        if number % 20 == 0:
            engine.turn(f"gone{number}", chunks_of(f"gone{number}"), reason="stop")


def test_who_does_not_come_back_is_demoted_when_others_need_the_room() -> None:
    engine = Engine(60, "sticky")
    some_are_gone(engine)
    assert Order(Action.DEMOTE, "gone780") in engine.orders
    assert engine.tier.missing(set(chunks_of("gone780"))) == 10


def test_nobody_is_demoted_where_no_slower_tier_keeps_a_copy() -> None:
    engine = Engine(60, "sticky")
    engine.rules.demotes = False
    some_are_gone(engine)
    assert Action.DEMOTE not in {order.action for order in engine.orders}


def test_shared_chunks_take_room_once() -> None:
    """Ten sessions of one system prompt fit beside each other where ten separate ones do not."""
    prompt = chunks_of("prompt", 60)
    engine = Engine(100, "sticky")
    for _ in range(20):
        for number in range(10):
            engine.turn(f"s{number}", [*prompt, f"own-{number}"])
            engine.let_pass(0.9)
    assert engine.hot_share > 0.95


def test_nothing_is_ordered_for_a_session_in_a_turn() -> None:
    engine = Engine(40, "sticky")
    round_robin(engine, sessions=10, rounds=10)
    engine.rules.turn_started("s1", engine.now)
    for _ in range(100):
        engine.now += 1
        assert all(order.session_id != "s1" for order in engine.rules.decide(engine.now))
    assert engine.rules.is_in_turn("s1")
    assert {row.seat for row in engine.rules.standings(engine.now, 1000) if row.session_id == "s1"}


def test_a_session_of_which_only_a_turn_start_is_known_is_in_a_turn() -> None:
    rules = Residency(10, "sticky")
    rules.turn_started("new", 0.0)
    assert rules.is_in_turn("new")
    assert not rules.is_unknown("new")
    assert rules.is_in_turn("never heard of")


def test_a_session_that_left_and_came_back_is_not_taken_for_what_it_was() -> None:
    rules = Residency(10, "sticky")
    rules.turn_ended("s", ["a"], None, 0.0)
    before = rules.last_turn_of("s")
    rules.left("s")
    assert rules.last_turn_of("s") == 0
    rules.turn_ended("s", ["a"], None, 1.0)
    assert rules.last_turn_of("s") not in (0, before)


def test_who_left_is_forgotten() -> None:
    engine = Engine(40, "sticky")
    round_robin(engine, sessions=10, rounds=10)
    for number in range(10):
        engine.rules.left(f"s{number}")
    assert len(engine.rules) == 0
    assert engine.rules.decide(engine.now + 1) == []


def test_what_could_not_be_brought_up_is_not_taken_for_hot() -> None:
    engine = Engine(100, "sticky")
    round_robin(engine, sessions=20, rounds=30)
    engine.orders.clear()
    while not any(order.action is Action.BRING_UP for order in engine.orders):
        round_robin(engine, sessions=20, rounds=1)
    order = next(o for o in reversed(engine.orders) if o.action is Action.BRING_UP)
    engine.rules.failed(order)
    standing = {row.session_id: row for row in engine.rules.standings(engine.now, 100)}
    assert standing[order.session_id].seat is not Seat.IN


def test_no_more_sessions_are_thought_about_than_the_bound() -> None:
    rules = Residency(10, "sticky")
    for number in range(CANDIDATES_MAX + 50):
        rules.turn_ended(f"s{number}", ["a"], None, float(number))
    assert len(rules) == CANDIDATES_MAX
    assert rules.is_unknown("s0")


def test_every_session_is_told_why_it_stands_where_it_stands() -> None:
    engine = Engine(40, "sticky")
    round_robin(engine, sessions=10, rounds=20)
    for row in engine.rules.standings(engine.now, 100):
        assert row.why
        assert row.chunks == 10
        assert row.hits_per_second >= 0
    assert set(engine.rules.learned()) == {"tool", "end", "other", "unknown"}


def _histories() -> st.SearchStrategy[list[tuple[str, int]]]:
    steps = st.tuples(st.sampled_from(["start", "end", "left", "wait"]), st.integers(0, 5))
    return st.lists(steps, max_size=120)


@settings(max_examples=60)
@given(_histories(), st.sampled_from(["sticky", "auto", "off"]))
def test_no_history_makes_it_act_on_a_turn_or_on_a_stranger(
    history: list[tuple[str, int]], policy: Policy
) -> None:
    rules, in_turn, known, now = Residency(12, policy), set[str](), set[str](), 0.0
    rng = random.Random(1)
    for what, number in history:
        session_id = f"s{number}"
        if what == "start":
            rules.turn_started(session_id, now)
            in_turn.add(session_id)
        elif what == "end":
            rules.turn_ended(session_id, chunks_of(session_id, 1 + number), None, now)
            in_turn.discard(session_id)
            known.add(session_id)
        elif what == "left":
            rules.left(session_id)
            in_turn.discard(session_id)
            known.discard(session_id)
        now += rng.choice([0.1, 1.0, 7.0])
        for order in _decided(rules, now):
            assert order.session_id in known - in_turn


def _decided(rules: Residency, now: float) -> Iterator[Order]:
    seen = set[str]()
    for order in rules.decide(now):
        assert order.session_id not in seen or order.action is not Action.BRING_UP
        seen.add(order.session_id)
        yield order
