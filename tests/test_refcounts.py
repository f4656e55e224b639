"""Counts, outbox rows and evictions against a model that keeps sets of owners."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from ramakv.core.counting import Holds
from ramakv.core.evictions import Batch, EvictionPolicy, EvictionQueue, Owed, Scope
from ramakv.core.refcounts import RefCounts

POLICY = EvictionPolicy(
    batch_chunks_max=3,
    batch_age_seconds=1.0,
    tries_max=3,
    retry_base_seconds=1.0,
    retry_max_seconds=4.0,
)
CHUNKS = "abcdef"


def make_counts() -> RefCounts:
    return RefCounts(EvictionQueue(POLICY, random.Random(0)))


def release(counts: RefCounts, *chunks: str, generation: int = 1, now: float = 0.0) -> None:
    """Reference and let go again, in one commit each."""
    counts.acquire(chunks)
    counts.settle(chunks, (), generation, Scope.RELEASE, now)
    counts.acquire((), chunks)
    counts.settle((), chunks, generation, Scope.RELEASE, now)


def test_a_key_is_held_until_its_last_holder_lets_go() -> None:
    holds: Holds[str] = Holds()
    holds.hold("aba")  # what one holder lists twice, it holds once
    holds.hold("bc")
    assert (holds.as_dict(), len(holds)) == ({"a": 1, "b": 2, "c": 1}, 3)
    assert [holds.let_go(key) for key in "bba"] == [1, 0, 0]
    assert ("b" in holds, holds.count("b"), holds.as_dict()) == (False, 0, {"c": 1})
    with pytest.raises(KeyError):
        holds.let_go("a")
    with pytest.raises(KeyError):
        holds.let_go_all("ca")


@pytest.mark.parametrize("shared", ["", "b"])
def test_many_are_let_go_at_once(shared: str) -> None:
    holds: Holds[str] = Holds()
    holds.hold("abc")
    holds.hold(shared)
    holds.let_go_all("ab")
    assert holds.as_dict() == dict.fromkeys([*shared, "c"], 1)


def test_the_last_release_queues_a_chunk() -> None:
    counts = make_counts()
    counts.acquire("ab")
    counts.settle("ab", (), 1, Scope.RELEASE, 0.0)
    counts.acquire("a")
    counts.settle("a", (), 2, Scope.RELEASE, 0.0)
    counts.acquire((), "ab")
    assert counts.settle((), "ab", 3, Scope.RELEASE, 0.0) == (1, [("a", 3)])
    assert counts.as_dict() == {"a": 1}


def test_an_undone_acquire_owes_the_withdrawn_evict_again() -> None:
    counts = make_counts()
    release(counts, "a", generation=7)
    counts.acquire("a")
    assert counts.evictions.take(100.0) is None
    counts.undo("a", (), 100.0)
    batch = counts.evictions.take(200.0)
    assert batch is not None
    assert batch.chunks == {"a": 7}


def test_a_row_stays_while_only_a_provisional_reference_keeps_its_chunk() -> None:
    counts = make_counts()
    counts.acquire("a")
    counts.settle("a", (), 1, Scope.RELEASE, 0.0)
    counts.acquire("a")  # somebody else's, not durable yet
    counts.acquire((), "a")
    assert counts.settle((), "a", 2, Scope.RELEASE, 0.0) == (0, [])
    assert counts.settle("a", (), 3, Scope.RELEASE, 0.0) == (0, [("a", 2)])


def test_an_undo_of_a_new_chunk_queues_nothing() -> None:
    counts = make_counts()
    counts.acquire("n")
    counts.undo("n", (), 0.0)
    assert (len(counts.evictions), counts.as_dict()) == (0, {})


def test_a_failed_batch_waits_again_without_what_is_referenced_by_now() -> None:
    counts = make_counts()
    release(counts, *"abc", generation=1)
    batch = counts.evictions.take(10.0)
    assert batch is not None
    counts.acquire("b")
    counts.settle("b", (), 2, Scope.RELEASE, 10.0)
    failed = counts.evict_failed(batch, 10.0, rejected=False)
    assert failed == ([("b", 1)], [])
    again = counts.evictions.take(100.0)
    assert again is not None
    assert again.chunks == {"a": 1, "c": 1}


@pytest.mark.parametrize("order", ["ab", "ba", "aB", "Ba"])
def test_two_that_let_go_in_one_commit_leave_the_row(order: str) -> None:
    """Whoever settles first must not take the other, who is gone from the disk, for a holder."""
    counts = make_counts()
    for _ in order:
        counts.acquire("x")
        counts.settle("x", (), 1, Scope.RELEASE, 0.0)
    for _ in order:
        counts.acquire((), "x")
    generations = {"a": 2, "b": 3 if order != order.lower() else 2}
    first, second = (generations[name] for name in order.lower())
    assert counts.settle((), "x", first, Scope.RELEASE, 0.0) == (0, [])
    assert counts.settle((), "x", second, Scope.RELEASE, 0.0) == (1, [])
    batch = counts.evictions.take(10.0)
    assert batch is not None
    assert batch.chunks == {"x": max(first, second)}


@dataclass
class Change:
    """A step of one owner: begun, then committed, then settled."""

    new: list[str]
    gone: list[str]
    generation: int = 0


@dataclass
class Model:
    """What is on disk, what is counted, and what must be evicted in the end."""

    counted: dict[str, set[str]] = field(default_factory=lambda: {c: set() for c in CHUNKS})
    durable: dict[str, set[str]] = field(default_factory=lambda: {c: set() for c in CHUNKS})
    rows: dict[str, int] = field(default_factory=dict)
    owed: dict[str, int] = field(default_factory=dict)
    """Chunks that nobody holds on disk, and the generation of the commit that made it so."""
    changes: dict[str, Change] = field(default_factory=dict)
    generation: int = 0

    def drop_rows(self, rows: list[tuple[str, int]]) -> None:
        for chunk, generation in rows:
            if self.rows.get(chunk, generation + 1) <= generation:
                del self.rows[chunk]

    def commit(self, owner: str, change: Change, *, grouped: bool) -> None:
        self.generation += not grouped
        change.generation = self.generation
        for chunk in change.new:
            self.durable[chunk].add(owner)
            self.owed.pop(chunk, None)
        for chunk in change.gone:
            self.durable[chunk].discard(owner)
            self.rows[chunk] = self.generation
            if not self.durable[chunk]:
                self.owed[chunk] = self.generation


OWNERS = st.sampled_from("PQRS")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), OWNERS, st.frozensets(st.sampled_from(CHUNKS), max_size=4)),
        st.tuples(st.just("commit"), OWNERS, st.booleans()),
        st.tuples(st.sampled_from(["settle", "undo"]), OWNERS, st.none()),
        st.tuples(st.sampled_from(["take", "done"]), st.none(), st.none()),
        st.tuples(st.just("fail"), st.none(), st.booleans()),
    ),
    max_size=80,
)


@settings(max_examples=500, deadline=None)
@given(STEPS)
def test_no_history_evicts_what_is_referenced_or_forgets_what_is_owed(
    steps: list[tuple[str, str, frozenset[str] | bool | None]],
) -> None:
    counts, model, flying, now = make_counts(), Model(), [], 0.0
    for kind, owner, what in steps:
        now += 10.0
        apply(counts, model, flying, now, kind, owner, what)
        assert counts.as_dict() == {c: len(o) for c, o in model.counted.items() if o}
        assert model.owed.keys() <= model.rows.keys(), "a crash now would forget an evict"
        assert_accounted_for(counts)
    for owner in list(model.changes):
        settle(counts, model, owner, now)
    in_flight = {chunk for batch in flying for chunk in batch.chunks}
    for chunk in CHUNKS:
        waits = counts.evictions.is_waiting(chunk)
        assert not (waits and model.durable[chunk])
        assert waits or chunk in in_flight or chunk not in model.owed


def assert_accounted_for(counts: RefCounts) -> None:
    """Every eviction that was queued is there, or its end was counted."""
    tallies, waiting = counts.evictions.tallies, len(counts.evictions)
    ends = tallies.done + tallies.withdrawn + tallies.superseded + tallies.forgiven + tallies.dead
    assert tallies.queued == ends + waiting + counts.evictions.in_flight_count


def apply(
    counts: RefCounts,
    model: Model,
    flying: list[Batch],
    now: float,
    kind: str,
    owner: str,
    what: frozenset[str] | bool | None,
) -> None:
    change = model.changes.get(owner)
    if kind == "begin" and change is None:
        assert isinstance(what, frozenset)
        held = {chunk for chunk in CHUNKS if owner in model.durable[chunk]}
        change = Change(sorted(what - held), sorted(held - what))
        model.changes[owner] = change
        counts.acquire(change.new, change.gone)
        for chunk in change.new:
            model.counted[chunk].add(owner)
    elif kind == "commit" and change is not None and not change.generation:
        model.commit(owner, change, grouped=bool(what) and model.generation > 0)
    elif kind in ("settle", "undo") and change and bool(change.generation) == (kind == "settle"):
        settle(counts, model, owner, now)
    elif kind == "take" and (batch := counts.evictions.take(now)) is not None:
        assert not any(model.counted[chunk] or model.durable[chunk] for chunk in batch.chunks)
        flying.append(batch)
    elif kind == "done" and flying:
        batch = flying.pop(0)
        for chunk, generation in batch.chunks.items():
            if model.owed.get(chunk, generation + 1) <= generation:
                del model.owed[chunk]
        model.drop_rows(counts.evicted(batch))
    elif kind == "fail" and flying:
        failed = counts.evict_failed(flying.pop(0), now, rejected=bool(what))
        model.drop_rows(failed.obsolete)
        for chunk, _ in failed.dead:  # it stays in the outbox, for people to see
            model.owed.pop(chunk, None)


def settle(counts: RefCounts, model: Model, owner: str, now: float) -> None:
    """End a change: as it was committed, or undone if it was not."""
    change = model.changes.pop(owner)
    if change.generation:
        for chunk in change.gone:
            model.counted[chunk].discard(owner)
        settled = counts.settle(change.new, change.gone, change.generation, Scope.RELEASE, now)
        model.drop_rows(settled.obsolete)
    else:
        for chunk in change.new:
            model.counted[chunk].discard(owner)
        model.drop_rows(counts.undo(change.new, change.gone, now))


def test_at_start_owed_rows_wait_and_rows_of_referenced_chunks_are_obsolete() -> None:
    counts = make_counts()
    counts.load("a")
    rows = [("a", Owed(4, Scope.RELEASE)), ("b", Owed(5, Scope.CLOSE))]
    assert counts.load_outbox(rows, 0.0) == [("a", 4)]
    batch = counts.evictions.take(10.0)
    assert batch is not None
    assert (batch.chunks, batch.scope) == ({"b": 5}, Scope.CLOSE)
