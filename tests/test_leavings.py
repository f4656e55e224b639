"""What turns leave behind: whether the end of a map, and what was released, is wanted again."""

from __future__ import annotations

from hypothesis import given, strategies as st

from ramakv.core.leavings import Leavings

MAPS = st.lists(st.sampled_from("abcdef"), max_size=12).map(tuple)


def grown(length: int, last: str = "") -> tuple[str, ...]:
    return (*(f"c{number}" for number in range(length)), *([last] if last else []))


def test_nothing_is_left_out_of_maps_that_grow() -> None:
    leavings = Leavings()
    for length in range(100):
        leavings.continued(grown(length), grown(length + 1))
    assert leavings.unwanted_end == 0


def test_a_last_chunk_that_is_never_wanted_again_is_left_out() -> None:
    """As where it was not full: the next turn has it full, under another hash."""
    leavings = Leavings()
    for length in range(50):
        leavings.continued(grown(length, "part"), grown(length + 1, "rest"))
    assert leavings.unwanted_end == 1


def test_a_few_turns_that_begin_anew_change_nothing() -> None:
    leavings = Leavings()
    for number in range(200):
        after = ("new",) if number % 4 == 0 else grown(20)
        leavings.continued(grown(10), after)
    assert leavings.unwanted_end == 0


def test_it_is_taken_back_when_maps_grow_again() -> None:
    leavings = Leavings()
    for _ in range(100):
        leavings.continued(("a", "b", "c"), ("a",))
    assert leavings.unwanted_end == 2
    for _ in range(100):
        leavings.continued(("a", "b", "c"), ("a", "b", "c", "d"))
    assert leavings.unwanted_end == 0


@given(st.lists(st.tuples(MAPS, MAPS), max_size=200))
def test_no_history_leaves_out_more_than_a_few_chunks(
    history: list[tuple[tuple[str, ...], tuple[str, ...]]],
) -> None:
    leavings = Leavings()
    for before, after in history:
        leavings.continued(before, after)
    assert 0 <= leavings.unwanted_end <= 8


def test_it_begins_as_if_what_is_released_came_back() -> None:
    assert Leavings().come_back


def test_what_is_never_wanted_again_need_not_stay() -> None:
    leavings = Leavings()
    for number in range(250):
        leavings.released({f"c{number}"})
    assert not leavings.come_back


def test_what_comes_back_while_lru_holds_it_stays() -> None:
    leavings = Leavings()
    for number in range(600):
        leavings.released({f"c{number}"})
        leavings.wanted([f"c{number}"], held={f"c{number}"} if number % 2 else set())
    assert leavings.come_back


def test_what_comes_back_when_lru_has_lost_it_shows_nothing() -> None:
    leavings = Leavings()
    for number in range(600):
        leavings.released({f"c{number}"})
        leavings.wanted([f"c{number}"], held=set())
    assert not leavings.come_back


def test_what_was_released_long_ago_is_forgotten() -> None:
    leavings = Leavings()
    leavings.released({f"c{number}" for number in range(10_000)})
    leavings.wanted(
        [f"c{number}" for number in range(10_000)], held={f"c{n}" for n in range(10_000)}
    )
    assert len(leavings._gone) == 0
    leavings.released({"x"})
    assert len(leavings._gone) == 1
