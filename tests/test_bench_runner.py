"""The benchmark's runner: who takes turns, and what becomes of a case that fails."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from bench.__main__ import arguments, options
from bench.results import Results
from bench.runner import Case, Options, Runner
from bench.workload import Workload
from bench.wrk import LoadError


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    chosen = Options(
        quick=True,
        rounds=4,
        seconds=1,
        connections=(64,),
        workload=Workload(sessions=4, chunks=4, changed=1, hash_chars=8),
        scale_sessions=(),
        starts=1,
        trace=None,
        trace_requests=None,
        trace_speed=1.0,
    )
    return Runner(chosen, Results(), tmp_path, Console(file=io.StringIO()))


def noting(log: list[str], name: str) -> Callable[[], None]:
    return lambda: log.append(name)


def test_contenders_take_turns_and_every_other_round_goes_backwards(runner: Runner) -> None:
    log: list[str] = []
    runner.alternate("s", [Case(name, noting(log, name)) for name in "abc"])
    assert "".join(log) == "abccbaabccba"


def test_a_case_that_fails_is_noted_once_and_the_others_go_on(runner: Runner) -> None:
    log: list[str] = []

    def fail() -> None:
        log.append("x")
        raise LoadError("3 answers were not 200")

    runner.alternate("s", [Case("a", noting(log, "a")), Case("x", fail)])
    assert "".join(log) == "axaaa"
    assert runner.results.failures == ["x: 3 answers were not 200"]


def test_no_two_loads_have_the_same_seed(runner: Runner) -> None:
    assert len({runner.seed() for _ in range(100)}) == 100


@pytest.mark.parametrize("quick", [True, False])
def test_medians_are_of_five_rounds(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAMAKV_TRACES", raising=False)
    monkeypatch.setattr("sys.argv", ["bench", "run", *(["--quick"] if quick else [])])

    chosen = options(arguments())
    assert (chosen.quick, chosen.rounds, chosen.trace) == (quick, 5, None)
    assert chosen.workload == Workload(1000, 200, 10, 64)
    assert ("scale" in chosen.sections) is not quick


def test_the_trace_is_found_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMAKV_TRACES", "somewhere")
    monkeypatch.setattr("sys.argv", ["bench", "run", "--quick"])

    trace = options(arguments()).trace
    assert trace is not None
    assert trace.parent == Path("somewhere")


@pytest.mark.parametrize("given", [["--rounds", "0"], ["--seconds", "-1"], ["--sections", "all"]])
def test_what_cannot_be_measured_is_a_usage_error(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "run", *given])
    with pytest.raises(SystemExit, match="2"):
        arguments()
    assert given[0] in capsys.readouterr().err
