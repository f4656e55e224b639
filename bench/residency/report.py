"""What the replays of a trace came to: JSON, tables, and one HTML page with the plots in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.report import html_page, number, table
from bench.residency.costs import MODELS

Result = dict[str, Any]


def shares_table(results: Sequence[Result], value: Callable[[Result], str]) -> str:
    """Return a table with a line for each policy and a column for each share."""
    shares = sorted({result["share"] for result in results})
    policies = list(dict.fromkeys(result["policy"] for result in results))
    cells = {(result["policy"], result["share"]): value(result) for result in results}
    rows = [[policy, *(cells.get((policy, share), "") for share in shares)] for policy in policies]
    return table(["", *(f"{100 * share:g} %" for share in shares)], rows)


def hot_table(results: Sequence[Result]) -> str:
    """Return the share of blocks found hot."""
    return shares_table(results, lambda result: f"{result['hot']:.3f}")


def ttft_table(results: Sequence[Result], model: str) -> str:
    """Return the times to the first token."""
    return shares_table(results, lambda result: _times(result["ttft_ms_by_model"][model]))


def _times(ms: dict[str, float]) -> str:
    values = [ms[key] for key in ("mean", "p50", "p90", "p99")]
    return " / ".join(number(value, 0 if value >= 100 else 1) for value in values)


def costs_table(results: Iterable[Result]) -> str:
    """Return what each replay did and cost."""
    columns = (
        ("share", "share", 3),
        ("hot", "hot", 3),
        ("disk", "disk", 3),
        ("recomputed", "recomputed", 3),
        ("evict calls", "evict_calls_per_turn", 2),
        ("prefetch calls", "prefetch_calls_per_turn", 2),
        ("chunks evicted", "evict_chunks_per_turn", 1),
        ("chunks prefetched", "prefetch_chunks_per_turn", 1),
        ("of them loaded", "loaded_chunks_per_turn", 1),
        ("daemon's CPU µs per event", "daemon_cpu_us_per_event", 0),
        ("replay s", "seconds", 0),
    )
    rows = [
        [
            result["policy"],
            *(
                number(result[key], digits) if result.get(key) is not None else ""
                for _, key, digits in columns
            ),
        ]
        for result in results
    ]
    return table(["policy", *(title for title, _, _ in columns)], rows)


def markdown(report: dict[str, Any]) -> str:
    """Return the whole report as Markdown, without plots."""
    results, described = report["results"], report["trace"]
    parts = [
        f"# Residency on `{described['name']}`",
        f"{described['turns']:,} requests, {described['blocks']:,} blocks of "
        f"{described['block_tokens']} tokens, {described['distinct_blocks']:,} distinct. "
        "Columns are the hot tier's capacity as a share of the distinct blocks.",
        "## Blocks found hot",
        "As a share of all blocks, from the front of each request to its first block that is not.",
        hot_table(results),
    ]
    for model in MODELS:
        parts += [
            f"## Time to the first token, {model.upper()} model",
            "Milliseconds by the cost model: mean / p50 / p90 / p99.",
            ttft_table(results, model),
        ]
    parts += ["## All figures", "Calls and chunks are per turn.", costs_table(results)]
    return "\n\n".join(parts) + "\n"


def write(report: dict[str, Any], json_file: Path | None, folder: Path | None) -> None:
    """Write the JSON; and into the folder the JSON, the report and, with matplotlib, plots."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
    if json_file is not None:
        json_file.write_bytes(text)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_bytes(text)
    (folder / "report.md").write_text(markdown(report))
    plots: dict[str, str] = {}
    try:
        from bench.residency.plots import draw
    except ModuleNotFoundError:
        pass  # `make bench-residency` installs it; the tables need none
    else:
        plots = draw(report, folder)
    title = f"Residency on {report['trace']['name']}"
    (folder / "report.html").write_text(html_page(title, markdown(report), plots))
