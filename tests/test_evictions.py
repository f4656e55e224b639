"""Batches: when they are due, what they hold, and what becomes of failed ones."""

from __future__ import annotations

import math
import random

from ramakv.core.evictions import GENERAL_REFUSAL, EvictionPolicy, EvictionQueue, Owed, Scope

POLICY = EvictionPolicy(
    batch_chunks_max=4,
    batch_age_seconds=2.0,
    tries_max=3,
    retry_base_seconds=1.0,
    retry_max_seconds=8.0,
)


def make_queue(chunks: str = "", scope: Scope = Scope.RELEASE) -> EvictionQueue:
    queue = EvictionQueue(POLICY, random.Random(0))
    for chunk in chunks:
        queue.add(chunk, Owed(1, scope), 0.0)
    return queue


def test_a_batch_is_due_when_it_is_full_or_old_enough() -> None:
    assert make_queue().next_due(0.0) == math.inf
    assert make_queue("abc").next_due(0.0) == 2.0
    assert make_queue("abcd").next_due(0.0) == 0.0
    assert make_queue("abc").take(1.9) is None
    assert make_queue("abc").take(2.0) is not None


def test_a_batch_holds_the_oldest_of_one_scope_up_to_its_size() -> None:
    queue = make_queue("abcdef")
    queue.add("z", Owed(1, Scope.CLOSE), 0.0)
    taken = [queue.take(5.0) for _ in range(4)]
    assert [batch and (batch.scope, "".join(batch.chunks)) for batch in taken] == [
        (Scope.RELEASE, "abcd"),
        (Scope.RELEASE, "ef"),
        (Scope.CLOSE, "z"),
        None,
    ]


def test_chunks_under_a_prefetch_stay() -> None:
    batch = make_queue("abc").take(5.0, busy={"b"})
    assert batch is not None
    assert "".join(batch.chunks) == "ac"


def test_a_batch_that_is_left_to_lmcache_waits_no_more_and_counts_as_left() -> None:
    queue = make_queue("abc")
    batch = queue.take(5.0)
    assert batch is not None
    queue.leave(batch)
    assert (len(queue), queue.in_flight_count) == (0, 0)
    assert queue.next_due(100.0) == math.inf
    assert (queue.tallies.queued, queue.tallies.left, queue.tallies.done) == (3, 3, 0)


def test_a_flush_takes_what_is_not_due() -> None:
    assert make_queue("a").take(0.0, flush=True) is not None


def test_an_outage_is_retried_whole_later_and_later() -> None:
    queue = make_queue("ab")
    delays = []
    now = 10.0
    for _ in range(6):
        batch = queue.take(now)
        assert batch is not None
        assert "".join(batch.chunks) == "ab"
        queue.retry(batch, now)
        delays.append(queue.next_due(now) - now)
        assert queue.take(now) is None
        now += 100.0
    full = [1, 2, 4, 8, 8, 8]
    assert all(want / 2 <= delay <= want for want, delay in zip(full, delays, strict=True))


def reject_until_settled(queue: EvictionQueue, bad: set[str], calls_max: int = 200) -> list[str]:
    """Play an LMCache that refuses batches with a bad hash in them; returns the dead letters."""
    now, dead = 10.0, []
    for _ in range(calls_max):
        batch = queue.take(now)
        if batch is None:
            if not len(queue):
                return dead
            now = queue.next_due(now)
            continue
        if bad & batch.chunks.keys():
            if (chunk := queue.halve(batch, now)) is not None:
                dead.append(chunk)
        else:
            queue.done(batch)
    return dead


def test_a_rejected_batch_is_halved_until_the_bad_hash_stands_alone() -> None:
    queue = make_queue("abcd")
    assert reject_until_settled(queue, {"c"}) == ["c"]
    assert (len(queue), queue.in_flight_count) == (0, 0)


def test_a_hash_is_not_given_up_while_lmcache_does_nothing_else_either() -> None:
    queue = make_queue("a")
    queue.succeeded()  # that was before
    assert reject_until_settled(queue, {"a"}, calls_max=20) == []
    assert len(queue) == 1
    queue.succeeded()
    assert reject_until_settled(queue, {"a"}, calls_max=2000) == ["a"]


def test_where_everything_is_rejected_batches_stay_whole() -> None:
    queue = EvictionQueue(POLICY, random.Random(0))
    for number in range(400):
        queue.add(f"{number}", Owed(1, Scope.RELEASE), 0.0)
    rejected = 0
    now = 10.0
    while rejected < 10 * GENERAL_REFUSAL:
        batch = queue.take(now)
        if batch is None:
            now = queue.next_due(now)
            continue
        assert queue.halve(batch, now) is None
        rejected += 1
    assert len(queue) == 400
    assert len(queue._retries) < 100 + 2 * GENERAL_REFUSAL


def test_withdrawing_empties_a_retry_without_a_trace() -> None:
    queue = make_queue("ab")
    batch = queue.take(5.0)
    assert batch is not None
    queue.retry(batch, 5.0)
    assert queue.withdraw("a") == Owed(1, Scope.RELEASE)
    assert queue.withdraw("b") == Owed(1, Scope.RELEASE)
    assert queue.withdraw("b") is None
    assert (queue.take(100.0), queue.next_due(100.0)) == (None, math.inf)


def test_an_outage_is_no_refusal() -> None:
    queue = make_queue("a")
    now = 10.0
    for _ in range(10):
        batch = queue.take(now)
        assert batch is not None
        queue.retry(batch, now)
        now = queue.next_due(now)
    refusals = 0
    dead = None
    while dead is None:
        batch = queue.take(now)
        assert batch is not None
        queue.succeeded()
        refusals += 1
        dead = queue.halve(batch, now)
        now = max(now, min(queue.next_due(now), 1e6))
    assert refusals == POLICY.tries_max
