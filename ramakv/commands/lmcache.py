"""`ramakv lmcache`: one question to every target at once, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import trio

from ramakv.commands.lmcache_output import Outcome, exit_code, show
from ramakv.commands.lmcache_targets import (
    find_targets,
    open_operator,
    parse_urls,
    refuse_one_process,
    run_trio,
)
from ramakv.errors import BackendError
from ramakv.lmcache.operating import LMCacheOperator

if TYPE_CHECKING:
    from ramakv.commands.lmcache_options import Call


def run(
    call: Call, urls: Sequence[str], *, as_json: bool, timeout_seconds: float, memory: bool
) -> int:
    """Ask every target, print what came, and return the exit code.

    `memory`: ask the first target only, and not where that would never end.
    """
    outcomes = run_trio(
        partial(_ask_all, call, parse_urls(urls), timeout_seconds=timeout_seconds, memory=memory)
    )
    show(outcomes, as_json=as_json)
    return exit_code(outcomes)


async def versions(target: LMCacheOperator) -> dict[str, str]:
    """Ask for version and commit, in each of the forms LMCache has for them."""
    return {
        "version": await target.version(),
        "lmc_version": await target.lmc_version(),
        "commit_id": await target.commit_id(),
    }


async def metrics(target: LMCacheOperator) -> dict[str, str]:
    """Ask for the samples of LMCache's own metrics; as text, because one may be NaN."""
    lines = (await target.metrics()).splitlines()
    samples = (line.rpartition(" ") for line in lines if line.startswith("lmcache:"))
    return {name: value for name, _, value in samples}


async def _ask_all(
    call: Call, urls: Sequence[str], *, timeout_seconds: float, memory: bool
) -> list[Outcome]:
    targets = await find_targets(urls, timeout_seconds, first_only=memory)
    outcomes = [Outcome(url) for url in targets]
    async with trio.open_nursery() as nursery:
        for outcome in outcomes:
            nursery.start_soon(_ask, call, outcome, timeout_seconds, memory)
    return outcomes


async def _ask(call: Call, outcome: Outcome, timeout_seconds: float, memory: bool) -> None:
    try:
        if memory:
            await refuse_one_process(outcome.url, timeout_seconds)
        async with open_operator(outcome.url, timeout_seconds) as target:
            outcome.answer = await call(target)
    except BackendError as error:
        outcome.error = error
