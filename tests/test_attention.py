"""Whom a decision looks at: nobody who has a chance is missed, and few others are looked at."""

from __future__ import annotations

from ramakv.core.attention import Attention
from ramakv.core.candidates import Candidate
from ramakv.core.pauses import Pauses, Reason, ends_at, step_of


def pauses_of(seconds: float) -> dict[Reason, Pauses]:
    """All pauses after a tool last so long."""
    found = Pauses()
    for _ in range(200):
        found.lasted(0, step_of(seconds))
        found.ended(step_of(seconds))
    found.learn(1.0)
    return {"tool": found}


def paused(session_id: str, since: float, now: float = 0.0) -> Candidate:
    session = Candidate(session_id, reason="tool", since=since)
    session.step = step_of(now - since)
    return session


def test_a_session_whose_time_comes_is_looked_at_again_then() -> None:
    pauses, attention = pauses_of(20.0), Attention()
    session = paused("s", since=0.0)
    attention.look(0.0, [session])
    price = max(pauses["tool"].to_load)
    attention.set_aside(pauses, [session], price)
    due = ends_at(step_of(20.0) - 1)
    assert not attention.look(due * 0.5, [session])
    assert session in attention.look(due, [session])


def test_a_turn_brings_a_session_back_at_once() -> None:
    pauses, attention = pauses_of(20.0), Attention()
    session = paused("s", since=0.0)
    attention.look(0.0, [session])
    attention.set_aside(pauses, [session], max(pauses["tool"].to_load))
    attention.draw(session)
    assert session in attention.look(1.0, [session])


def test_those_in_a_turn_and_residents_are_never_set_aside() -> None:
    pauses, attention = pauses_of(20.0), Attention()
    running, resident = paused("r", 0.0), paused("i", 0.0)
    running.is_running = resident.is_in = True
    attention.look(0.0, [running, resident])
    attention.set_aside(pauses, [], 1e9)
    assert set(attention.look(1.0, [])) == {running, resident}


def test_all_are_looked_at_now_and_then() -> None:
    pauses, attention = pauses_of(20.0), Attention()
    old = paused("old", since=-50_000.0)
    attention.look(0.0, [old])
    attention.set_aside(pauses, [], 1e9)
    assert not attention.look(59.0, [old])
    assert old in attention.look(60.0, [old])


def test_who_is_gone_does_not_come_back() -> None:
    pauses, attention = pauses_of(20.0), Attention()
    session = paused("s", since=0.0)
    attention.look(0.0, [session])
    attention.set_aside(pauses, [session], max(pauses["tool"].to_load))
    attention.forget(session)
    assert not attention.look(30.0, [])


def test_of_many_who_offer_the_same_only_the_best_are_looked_at_again_soon() -> None:
    pauses, attention = pauses_of(20.0), Attention()
    sessions = [paused(f"s{number}", since=0.0, now=15.0) for number in range(10)]
    attention.look(15.0, sessions)
    attention.set_aside(pauses, sessions[:3], price=0.0)
    assert list(attention.look(15.5, sessions)) == sessions[:3]
    assert set(attention.look(ends_at(step_of(20.0) - 1), sessions)) == set(sessions)
