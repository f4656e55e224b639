"""Whatever bytes are a body: they are taken or refused, and the daemon goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from tests.hostile import decoder
from tests.hostile.bodies import BODIES
from tests.hostile.house import House, check_envelopes, living_in
from tests.hostile.mutations import BODY_TOKENS, SEEDS, mutated


@settings(max_examples=200, derandomize=True, deadline=None)
@given(BODIES)
def test_the_decoder_accepts_or_refuses_and_nothing_else(body: bytes) -> None:
    decoder.check(body)


def test_what_is_almost_an_event_is_decoded_or_refused() -> None:
    chance = random.Random(7)
    accepted = 0
    for _ in range(10_000):
        accepted += decoder.check(mutated(chance, chance.choice(SEEDS), BODY_TOKENS))
    assert 1000 < accepted < 10_000  # neither nothing but nonsense, nor nothing but events


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with living_in(
        tmp_path_factory.mktemp("house"), debug_enabled=True, limits__session_id_chars_max=12
    ) as house:
        yield house


@settings(max_examples=100, derandomize=True, deadline=None)
@given(BODIES)
def test_any_body_gets_an_answer_of_the_contract(house: House, body: bytes) -> None:
    before = house.state()
    envelopes = check_envelopes(house.ask(body))
    after = house.state()  # the witness is well
    assert after[0] == before[0]
    if not any(envelope["ok"] for envelope in envelopes):
        assert after == before
