"""The plots, as PNG and SVG. Only this module needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas

from bench.measure import CURVE_PERCENTILES, median
from bench.results import Figure, Results
from bench.workload import KINDS

mpl.rcParams["svg.hashsalt"] = "ramakv"  # the same results, the same file
mpl.rcParams["svg.fonttype"] = "none"

CONNECTIONS = 64


def draw(results: Results, folder: Path) -> dict[str, str]:
    """Draw what there is to draw; returns the SVGs by title."""
    drawings: dict[str, tuple[str, Callable[[Canvas, Results], bool]]] = {
        "latency": ("Latency at 64 connections, closed loop", _latency),
        "open-loop": ("Latency at a set rate, open loop", _open_loop),
        "throughput": ("Events a second against connections", _throughput),
        "sessions": ("What a turn_end and a session cost against sessions", _sessions),
    }
    found = {}
    for name, (title, plot) in drawings.items():
        canvas = Canvas(figsize=(11, 7), layout="constrained")
        if not plot(canvas, results):
            continue
        found[title] = save(canvas, title, folder / name)
    return found


def save(canvas: Canvas, title: str, path: Path) -> str:
    """Write a plot as PNG and SVG, beside each other; returns the SVG."""
    canvas.suptitle(title)
    for kind in ("png", "svg"):
        metadata = {"Date": None} if kind == "svg" else None
        canvas.savefig(path.with_suffix(f".{kind}"), metadata=metadata, dpi=110)
    return path.with_suffix(".svg").read_text()


def _typical(figure: Figure) -> list[float]:
    return [median(points) for points in zip(*figure.curves, strict=True)]


def _latency(canvas: Canvas, results: Results) -> bool:
    return _curves(canvas, results, {kind: kind for kind in KINDS})


def _open_loop(canvas: Canvas, results: Results) -> bool:
    return _curves(canvas, results, {kind: f"{kind}, open loop" for kind in KINDS})


def _curves(canvas: Canvas, results: Results, scenarios: dict[str, str]) -> bool:
    drawn = False
    for axes, (kind, scenario) in zip(_quarters(canvas), scenarios.items(), strict=True):
        for figure in results.figures:
            if (figure.scenario, figure.connections) != (scenario, CONNECTIONS):
                continue
            if not figure.curves:
                continue
            below = [(p, y) for p, y in zip(CURVE_PERCENTILES, _typical(figure), strict=True)]
            # 1 in 100, in 1,000, …: the tail is what such a plot is for.
            points = [(1 / (1 - p / 100), y) for p, y in below if p < 100]
            axes.plot(*zip(*points, strict=True), label=figure.contender)
            drawn = True
        axes.set(xscale="log", yscale="log", title=kind, ylabel="ms")
        axes.set_xticks([2, 10, 100, 1000, 10000], ["p50", "p90", "p99", "p99.9", "p99.99"])
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    return drawn


def _throughput(canvas: Canvas, results: Results) -> bool:
    drawn = False
    for axes, kind in zip(_quarters(canvas), KINDS, strict=True):
        lines: dict[str, dict[int, float]] = {}
        for figure in results.figures:
            if figure.scenario == kind:
                points = lines.setdefault(figure.contender, {})
                points[figure.connections] = figure.median("per_second")
        for contender, points in lines.items():
            axes.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=contender)
            drawn = True
        axes.set(xscale="log", title=kind, xlabel="connections", ylabel="per second")
        axes.set_xticks([1, 16, 64, 256], ["1", "16", "64", "256"])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    return drawn


def _sessions(canvas: Canvas, results: Results) -> bool:
    from bench.targets import RAMAKV, among

    points = sorted(results.scale, key=lambda point: point.sessions)
    loaded = [
        (point.sessions, figure)
        for point in points
        if (figure := results.figure(among(point.sessions), RAMAKV, CONNECTIONS)) is not None
    ]
    if not loaded:
        return False
    cost, rate, memory, start = _quarters(canvas)
    sessions = [count for count, _ in loaded]
    cost.plot(sessions, [figure.median("cpu_us") for _, figure in loaded], marker="o")
    cost.set(title="CPU of a turn_end", ylabel="µs")
    rate.plot(sessions, [figure.median("per_second") for _, figure in loaded], marker="o")
    rate.set(title="turn_ends", ylabel="per second")
    for chunks in sorted({point.chunks for point in points}):
        some = [point for point in points if point.chunks == chunks]
        at = [point.sessions for point in some]
        label = f"{chunks} chunks each"
        memory.plot(at, [point.rss_mb for point in some], marker="o", label=label)
        start.plot(at, [median(point.start_seconds) for point in some], marker="o", label=label)
    memory.set(title="RSS after the start", ylabel="MB")
    start.set(title="start to first answer", ylabel="s")
    for axes in (cost, rate, memory, start):
        axes.set(xscale="log", xlabel="sessions")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    memory.legend(fontsize="small")
    start.legend(fontsize="small")
    return True


def _quarters(canvas: Canvas) -> list[Any]:
    return list(canvas.subplots(2, 2).flat)
