"""The plots of a residency report, as PNG and SVG. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from bench.plots import save
from bench.residency.costs import MODELS

Result = dict[str, Any]


def draw(report: dict[str, Any], folder: Path) -> dict[str, str]:
    """Draw hit share and time to the first token against capacity; returns the SVGs by title."""
    results = report["results"]
    found = {}
    canvas = Canvas(figsize=(11, 7), layout="constrained")
    axes = canvas.subplots()
    _lines(axes, results, lambda result: result["hot"])
    axes.set(ylabel="share of blocks found hot", ylim=(0, 1))
    title = "Blocks found hot against capacity"
    found[title] = save(canvas, title, folder / "hot")
    for model in MODELS:
        canvas = Canvas(figsize=(11, 5), layout="constrained")
        for axes, key in zip(canvas.subplots(1, 2), ("mean", "p90"), strict=True):
            _lines(axes, results, partial(_first_token_ms, model, key))
            axes.set(title=key, ylabel="ms")
            axes.set_ylim(bottom=0)
        title = f"Time to the first token against capacity, {model.upper()} model"
        found[title] = save(canvas, title, folder / f"ttft-{model}")
    return found


def _first_token_ms(model: str, key: str, result: Result) -> float:
    value: float = result["ttft_ms_by_model"][model][key]
    return value


def _lines(axes: Any, results: list[Result], value: Callable[[Result], float]) -> None:
    """Draw a line for each policy over the shares."""
    for policy in dict.fromkeys(result["policy"] for result in results):
        points = sorted(
            (100 * result["share"], value(result))
            for result in results
            if result["policy"] == policy
        )
        style = "--" if policy == "future" else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", label=policy)
    ticks = sorted({100 * result["share"] for result in results})
    axes.set(xscale="log", xlabel="hot tier, % of the distinct blocks")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
