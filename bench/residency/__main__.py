"""Replay a recorded trace in virtual time through the real service, at several capacities."""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from bench.residency import report, runner
from bench.residency.costs import MODELS
from bench.residency.player import ALL, BASELINES, POLICIES, Setting, check
from bench.residency.trace import Trace, load
from ramakv.errors import ConfigError

SHARES = "0.01,0.02,0.03,0.05,0.1"
SCHEMA = "ramakv-residency/1"


def share(text: str) -> float:
    """Read a share above 0, for argparse."""
    if not 0 < (number := float(text)) <= 1:
        raise ValueError
    return number


def shares(text: str) -> tuple[float, ...]:
    """Read shares between commas."""
    return tuple(share(part) for part in text.split(","))


def policies(text: str) -> tuple[str, ...]:
    """Read names of policies between commas."""
    names = tuple(text.split(","))
    if unknown := set(names) - {*BASELINES, *POLICIES}:
        raise argparse.ArgumentTypeError(
            f"no policy {', '.join(sorted(unknown))}; there are {', '.join(BASELINES + POLICIES)}"
        )
    return names


def positive(text: str) -> int:
    """Read a number from 1 on."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def seconds(text: str) -> float:
    """Read seconds."""
    if not (number := float(text)) >= 0:
        raise ValueError
    return number


def override(text: str) -> tuple[str, Any]:
    """Read `key=value`; the value is TOML, or a bare word."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected key=value")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.residency", description=__doc__)
    parser.add_argument("trace", type=Path, help="JSON lines, gzipped or not")
    parser.add_argument("--shares", type=shares, default=shares(SHARES), metavar=SHARES)
    parser.add_argument(
        "--policies",
        type=policies,
        default=ALL,
        metavar="off,sticky,auto",
        help="ramakv with these policies, and for comparison lru (nobody beside the engine), rust "
        "(what the Rust daemon does) and future (farthest next use, the bound)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write report and plots there")
    parser.add_argument("--model", choices=MODELS, default="8b", help="whose disk and turns")
    parser.add_argument("--requests", type=positive, help="only so many of the trace's")
    parser.add_argument("--disk-share", type=share, default=1.0, help="of the disk tier")
    parser.add_argument("--jobs", type=positive, default=2, help="replays at a time")
    parser.add_argument("--call-seconds", type=seconds, default=0.002, help="a call to LMCache")
    parser.add_argument(
        "--suspend-after-seconds",
        type=seconds,
        default=300.0,
        help="a pause after which the Rust daemon's agents suspend their session",
    )
    parser.add_argument(
        "--set",
        type=override,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of ramakv's configuration, such as turn_start_prefetch=false; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


def settings(given: argparse.Namespace) -> list[Setting]:
    """Return a setting for each share and policy."""
    return [
        Setting(
            share=a_share,
            policy=policy,
            model=given.model,
            disk_share=given.disk_share,
            call_seconds=given.call_seconds,
            suspend_after_seconds=given.suspend_after_seconds,
            seed=given.seed,
            overrides=dict(given.set),
        )
        for a_share in given.shares
        for policy in given.policies
    ]


def describe(
    trace: Trace, given: argparse.Namespace, results: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return what is written as JSON."""
    return {
        "schema": SCHEMA,
        "trace": {
            "name": trace.name,
            "turns": len(trace.turns),
            "blocks": trace.blocks,
            "distinct_blocks": trace.distinct_blocks,
            "block_tokens": trace.block_tokens,
        },
        "options": {
            **{
                name: getattr(given, name)
                for name in ("model", "disk_share", "call_seconds", "suspend_after_seconds", "seed")
            },
            "set": dict(given.set),
        },
        "models": {name: asdict(model) for name, model in MODELS.items()},
        "results": results,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. 2: it could not begin."""
    given = arguments(words)
    console, errors = Console(), Console(stderr=True)
    began = time.monotonic()
    try:
        for setting in settings(given):
            check(setting)
        trace = load(given.trace, given.requests)
        results = runner.run(
            trace, given.trace, given.requests, settings(given), jobs=given.jobs, console=errors
        )
    except ConfigError as error:
        errors.print(str(error), style="red", highlight=False, markup=False)
        return 2
    described = describe(trace, given, results)
    described["seconds"] = time.monotonic() - began
    report.write(described, given.json, given.out)
    console.print(Markdown(report.markdown(described)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
