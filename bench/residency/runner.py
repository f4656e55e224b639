"""Runs many replays of one trace in processes of their own, and shows how far they are."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from bench.residency import trace as traces
from bench.residency.player import Setting, replay
from bench.residency.trace import Trace

_REPORTED_TURNS = 100
"""How many turns a process plays between two reports."""


@dataclass(frozen=True)
class _Prepared:
    """What a process has before its first replay."""

    trace: Trace
    turns_done: Any


_prepared: _Prepared


def run(
    trace: Trace,
    path: Path,
    limit: int | None,
    settings: Sequence[Setting],
    *,
    jobs: int,
    console: Console,
) -> list[dict[str, Any]]:
    """Replay with each setting, `jobs` at a time; returns the results in the settings' order.

    Each process reads the trace, of which `path` and `limit` tell, once. Raises ConfigError
    where a setting cannot be.
    """
    # Not forked: a fork copies the locks of the thread that draws the progress.
    context = multiprocessing.get_context("spawn")
    turns_done = context.Value("q", 0)
    turns = len(settings) * len(trace.turns)
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
        ProcessPoolExecutor(
            min(jobs, len(settings)),
            mp_context=context,
            initializer=_prepare,
            initargs=(path, limit, turns_done),
        ) as pool,
    ):
        task = bar.add_task(trace.name, total=turns)
        futures = [pool.submit(_replay, setting) for setting in settings]
        waiting: set[Future[dict[str, Any]]] = set(futures)
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=0.5)
                for future in done:
                    future.result()  # the first that fails ends it all
                bar.update(task, completed=turns_done.value)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        bar.update(task, completed=turns)
    return [future.result() for future in futures]


def _prepare(path: Path, limit: int | None, turns_done: Any) -> None:
    global _prepared
    _prepared = _Prepared(traces.load(path, limit), turns_done)
    gc.collect()
    gc.freeze()  # millions of references that no collection need look at


def _replay(setting: Setting) -> dict[str, Any]:
    done = _prepared.turns_done
    unreported = 0

    def on_turn() -> None:
        nonlocal unreported
        unreported += 1
        if unreported == _REPORTED_TURNS:
            unreported = 0
            with done.get_lock():
                done.value += _REPORTED_TURNS

    return replay(_prepared.trace, setting, on_turn)
