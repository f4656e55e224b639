"""Counts, outbox rows and evictions against a model that keeps sets of owners."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings, strategies as st

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
    counts.settle((), chunks, generation, Scope.RELEASE, now)


def test_the_last_release_queues_a_chunk() -> None:
    counts = make_counts()
    counts.acquire("ab")
    counts.settle("ab", (), 1, Scope.RELEASE, 0.0)
    counts.acquire("a")
    counts.settle("a", (), 2, Scope.RELEASE, 0.0)
    assert counts.settle((), "ab", 3, Scope.RELEASE, 0.0) == (1, [("a", 3)])
    assert counts.as_dict() == {"a": 1}


def test_an_undone_acquire_owes_the_withdrawn_evict_again() -> None:
    counts = make_counts()
    release(counts, "a", generation=7)
    counts.acquire("a")
    assert counts.evictions.take(100.0) is None
    counts.undo("a", 100.0)
    batch = counts.evictions.take(200.0)
    assert batch is not None
    assert batch.chunks == {"a": 7}


def test_a_row_stays_while_only_a_provisional_reference_keeps_its_chunk() -> None:
    counts = make_counts()
    counts.acquire("a")
    counts.settle("a", (), 1, Scope.RELEASE, 0.0)
    counts.acquire("a")  # somebody else's, not durable yet
    assert counts.settle((), "a", 2, Scope.RELEASE, 0.0) == (0, [])
    assert counts.settle("a", (), 3, Scope.RELEASE, 0.0) == (0, [("a", 2)])


def test_a_failed_undo_of_a_new_chunk_queues_nothing() -> None:
    counts = make_counts()
    counts.acquire("n")
    counts.undo("n", 0.0)
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


@dataclass
class Model:
    """Owners by chunk; what is on disk; what may be evicted."""

    owners: dict[str, set[str]] = field(default_factory=lambda: {c: set() for c in CHUNKS})
    durable: dict[str, set[str]] = field(default_factory=lambda: {c: set() for c in CHUNKS})
    rows: dict[str, int] = field(default_factory=dict)
    pending: dict[str, frozenset[str]] = field(default_factory=dict)
    generation: int = 0

    def drop_rows(self, rows: list[tuple[str, int]]) -> None:
        for chunk, generation in rows:
            if self.rows.get(chunk, generation + 1) <= generation:
                del self.rows[chunk]


OWNERS = st.sampled_from("PQR")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), OWNERS, st.frozensets(st.sampled_from(CHUNKS), max_size=4)),
        st.tuples(st.just("settle"), OWNERS, st.none()),
        st.tuples(st.just("undo"), OWNERS, st.none()),
        st.tuples(st.just("release"), OWNERS, st.none()),
        st.tuples(st.just("take"), st.none(), st.none()),
        st.tuples(st.just("done"), st.none(), st.none()),
        st.tuples(st.just("fail"), st.none(), st.booleans()),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_no_history_evicts_what_is_referenced_or_forgets_what_is_owed(
    steps: list[tuple[str, str, frozenset[str] | bool | None]],
) -> None:
    counts, model, flying, now = make_counts(), Model(), [], 0.0
    for kind, owner, what in steps:
        now += 10.0
        apply(counts, model, flying, now, kind, owner, what)
        assert counts.as_dict() == {c: len(o) for c, o in model.owners.items() if o}
        in_flight = {chunk for batch in flying for chunk in batch.chunks}
        for chunk in CHUNKS:
            if counts.evictions.is_waiting(chunk):
                assert not model.owners[chunk]
                assert chunk in model.rows
            elif chunk in model.rows and not model.owners[chunk]:
                assert chunk in in_flight, "owed, unreferenced, and nobody will evict it"
            if chunk in model.rows and model.durable[chunk]:
                assert model.pending or chunk in in_flight, "a row that nobody will drop"


def apply(
    counts: RefCounts,
    model: Model,
    flying: list[Batch],
    now: float,
    kind: str,
    owner: str,
    what: frozenset[str] | bool | None,
) -> None:
    if kind == "acquire" and owner not in model.pending:
        assert isinstance(what, frozenset)
        new = frozenset(chunk for chunk in what if owner not in model.owners[chunk])
        model.pending[owner] = new
        counts.acquire(sorted(new))
        for chunk in new:
            model.owners[chunk].add(owner)
    elif kind == "settle" and owner in model.pending:
        model.generation += 1
        new = model.pending.pop(owner)
        for chunk in new:
            model.durable[chunk].add(owner)
        settled = counts.settle(sorted(new), (), model.generation, Scope.RELEASE, now)
        model.drop_rows(settled.obsolete)
    elif kind == "undo" and owner in model.pending:
        new = model.pending.pop(owner)
        for chunk in new:
            model.owners[chunk].discard(owner)
        counts.undo(sorted(new), now)
    elif kind == "release" and owner not in model.pending:
        held = sorted(chunk for chunk in CHUNKS if owner in model.durable[chunk])
        model.generation += 1
        model.rows.update(dict.fromkeys(held, model.generation))
        for chunk in held:
            model.owners[chunk].discard(owner)
            model.durable[chunk].discard(owner)
        settled = counts.settle((), held, model.generation, Scope.RELEASE, now)
        assert settled.queued == sum(not model.owners[chunk] for chunk in held)
        model.drop_rows(settled.obsolete)
    elif kind == "take" and (batch := counts.evictions.take(now)) is not None:
        assert not any(model.owners[chunk] for chunk in batch.chunks)
        flying.append(batch)
    elif kind == "done" and flying:
        model.drop_rows(counts.evicted(flying.pop(0), now))
    elif kind == "fail" and flying:
        failed = counts.evict_failed(flying.pop(0), now, rejected=bool(what))
        model.drop_rows(failed.obsolete)
        model.drop_rows(failed.dead)


def test_at_start_owed_rows_wait_and_rows_of_referenced_chunks_are_obsolete() -> None:
    counts = make_counts()
    counts.load("a")
    rows = [("a", Owed(4, Scope.RELEASE)), ("b", Owed(5, Scope.CLOSE))]
    assert counts.load_outbox(rows, 0.0) == [("a", 4)]
    batch = counts.evictions.take(10.0)
    assert batch is not None
    assert (batch.chunks, batch.scope) == ({"b": 5}, Scope.CLOSE)
