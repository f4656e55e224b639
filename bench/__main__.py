"""`python -m bench`: run the benchmark, or write the report of a run again."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from bench import machine, report, results as results_module, scale, scenarios
from bench.results import Results
from bench.runner import Options, Runner
from bench.scenarios import Stage
from bench.targets import check
from bench.workload import Workload
from bench.wrk import LoadError, check_wrk

TRACES_VARIABLE = "RAMAKV_TRACES"
BUSY_TRACE = "claude_code_busy_local.jsonl.gz"
OUT = Path("build/bench")

BESIDE_FLOORS: dict[str, Callable[[Runner, Stage], None]] = {
    "closed": scenarios.closed_loops,
    "probes": scenarios.probes,
    "open": scenarios.open_loops,
    "agents": scenarios.agents,
}
ALONE: dict[str, Callable[[Runner], None]] = {
    "lmcache": scenarios.slow_backends,
    "evictions": scenarios.evictions,
    "memory": scale.distinct_chunks,
    "scale": scale.many_sessions,
}
SECTIONS = (*BESIDE_FLOORS, *ALONE)
QUICK = {"closed", "probes", "lmcache", "evictions"}


def positive(text: str) -> int:
    """Read a number from 1 on, for argparse."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, and write the report")
    run.add_argument("--quick", action="store_true", help="under two minutes, fewer scenarios")
    run.add_argument("--rounds", type=positive, default=5)
    run.add_argument("--seconds", type=positive, help="of each load; default 1 (quick) or 3")
    run.add_argument("--hash-chars", type=int, default=64)
    run.add_argument("--peer", metavar="URL", help="another server of the same contract")
    run.add_argument("--peer-pid", type=int, help="its process, to count its CPU")
    run.add_argument("--trace", type=Path, help=f"agent trace; default ${TRACES_VARIABLE}'s")
    run.add_argument("--trace-requests", type=positive, help="only so many of its requests")
    run.add_argument("--sections", nargs="+", choices=SECTIONS, help="only these")
    run.add_argument("--out", type=Path, help=f"folder of the report; default in {OUT}")
    run.add_argument("--strict", action="store_true", help="exit 1 unless every target is met")
    again = commands.add_parser("report", help="write a run's report again")
    again.add_argument("results", type=Path, help="its results.json")
    return parser.parse_args()


def options(given: argparse.Namespace) -> Options:
    """Return what to run."""
    quick: bool = given.quick
    trace: Path | None = given.trace
    if trace is None and os.environ.get(TRACES_VARIABLE):
        trace = Path(os.environ[TRACES_VARIABLE]) / BUSY_TRACE
    usual = [name for name in SECTIONS if name in QUICK or not quick]
    return Options(
        quick=quick,
        rounds=given.rounds,
        seconds=given.seconds or (1 if quick else 3),
        connections=(64,) if quick else (1, 16, 64, 256),
        workload=Workload(hash_chars=given.hash_chars),
        scale_sessions=(1_000, 10_000) if quick else (1_000, 10_000, 100_000),
        starts=3 if quick else 5,
        trace=trace,
        trace_requests=given.trace_requests or (300 if quick else 2000),
        trace_speed=400.0 if quick else 60.0,
        peer=given.peer,
        peer_pid=given.peer_pid,
        sections=tuple(given.sections or usual),
    )


def run(given: argparse.Namespace, console: Console) -> int:
    """Measure and report. 0: measured. 1: a load failed, or with --strict a target."""
    chosen = options(given)
    if chosen.trace is not None and not chosen.trace.is_file():
        raise LoadError(f"there is no trace {chosen.trace}; name one with --trace")
    out: Path = given.out or OUT / ("quick" if chosen.quick else "full")
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    # Beside the report and not in /tmp, which may be in memory, where an fsync costs nothing.
    with tempfile.TemporaryDirectory(dir=out, prefix="data-") as data:
        described = {
            **{key: value for key, value in asdict(chosen).items() if key != "peer_pid"},
            "trace": chosen.trace.name if chosen.trace else "synthetic",
        }
        results = Results(machine=machine.describe(Path(data)), options=described)
        runner = Runner(chosen, results, Path(data), console)
        with runner.showing_progress():
            measure(runner)
    results.machine["load_after"] = os.getloadavg()[0]
    results.machine["seconds"] = time.monotonic() - began
    report.write(results, out)
    verdicts = check(results)
    console.print(Markdown(report.ratios_table(results)))
    console.print(Markdown(report.targets_table(verdicts)))
    console.print(f"{results.machine['seconds']:.0f} s; report: {out / 'report.html'}")
    if results.failures:
        console.print("[red]failed:[/red] " + "; ".join(results.failures), highlight=False)
        return 1
    return int(given.strict and any(verdict.met is False for verdict in verdicts))


def measure(runner: Runner) -> None:
    """Run the sections that were asked for."""
    wanted = runner.options.sections
    if any(name in wanted for name in BESIDE_FLOORS):
        with scenarios.stage(runner) as on:
            for name, side_by_side in BESIDE_FLOORS.items():
                if name in wanted:
                    side_by_side(runner, on)
    for name, alone in ALONE.items():
        if name in wanted:
            try:
                alone(runner)
            except (LoadError, TimeoutError) as error:
                runner.fail(f"{name}: {error}")


def main() -> int:
    """Run the command; returns the exit code. 2: it could not begin."""
    given = arguments()
    console = Console()
    if given.command == "report":
        report.write(results_module.load(given.results), given.results.parent)
        return 0
    try:
        check_wrk()
        return run(given, console)
    except LoadError as error:
        console.print(str(error), style="red", highlight=False)
        return 2


if __name__ == "__main__":
    sys.exit(main())
