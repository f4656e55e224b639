"""The hot tier in miniature."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, strategies as st

from ramakv.core.shadow import SAMPLED_MAX, ShadowTier, sample_of, sampling_of

PROMPTS = st.lists(st.lists(st.integers(0, 30).map(str), unique=True, max_size=8), max_size=40)


@given(PROMPTS, st.integers(1, 12))
def test_it_holds_what_a_plain_lru_list_holds(prompts: list[list[str]], capacity: int) -> None:
    tier, plain = ShadowTier(capacity), OrderedDict[str, None]()
    for prompt in prompts:
        hits = next((n for n, chunk in enumerate(prompt) if chunk not in plain), len(prompt))
        assert tier.hits(prompt) == hits
        tier.use(prompt)
        for chunk in reversed(prompt):
            plain[chunk] = None
            plain.move_to_end(chunk)
        while len(plain) > capacity:
            plain.popitem(last=False)
        assert tier.next_to_go(100) == list(plain)


def test_what_is_renewed_outlives_what_is_not() -> None:
    tier = ShadowTier(4)
    tier.use(["a", "b"])
    tier.use(["c", "d"])
    tier.renew(["a", "b", "not here"])
    tier.use(["e", "f"])
    assert (tier.missing(["a", "b"]), tier.missing(["c", "d"])) == (0, 2)
    assert tier.displaced == 2


def test_what_is_dropped_leaves_room() -> None:
    tier = ShadowTier(2)
    tier.use(["a", "b"])
    tier.drop(["a", "not here"])
    tier.use(["c"])
    assert (len(tier), tier.displaced, tier.missing("abc")) == (2, 0, 1)


def test_one_becomes_another_and_then_goes_its_own_way() -> None:
    one, other = ShadowTier(3), ShadowTier(3)
    other.use(["a", "b"])
    one.become(other)
    other.use(["c", "d"])
    assert one.hits(["a", "b"]) == 2


@given(st.integers(1, 10**7))
def test_a_miniature_follows_few_chunks_of_any_tier(capacity: int) -> None:
    assert capacity // sampling_of(capacity) <= SAMPLED_MAX


def test_a_sample_is_a_fair_share_in_the_order_of_the_map() -> None:
    chunks = [f"{number:x}" for number in range(20_000)]
    sample = sample_of(chunks, 10)
    assert 1700 < len(sample) < 2300
    assert sample == sorted(sample, key=chunks.index)
