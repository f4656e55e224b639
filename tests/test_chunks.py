"""Chunk maps compared as sets, in their order."""

from __future__ import annotations

from hypothesis import example, given, strategies as st

from ramakv.core.chunks import ChunkMap, diff

MAPS = st.lists(st.sampled_from("abcde"), max_size=8).map(tuple)


@given(MAPS, MAPS)
@example(("a", "b", "c"), ("a", "b", "d", "a"))  # what they begin with comes again
@example(("a", "b", "a"), ("a",))
def test_a_diff_says_what_came_and_what_went_each_once_and_in_order(
    old: ChunkMap, new: ChunkMap
) -> None:
    added, removed, alike = diff(old, new)
    assert (added, removed) == (
        tuple(dict.fromkeys(chunk for chunk in new if chunk not in old)),
        tuple(dict.fromkeys(chunk for chunk in old if chunk not in new)),
    )
    assert old[:alike] == new[:alike]
    assert old[alike : alike + 1] != new[alike : alike + 1] or len(old) == len(new) == alike
