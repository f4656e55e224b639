"""The report: Markdown tables, and one HTML page with the plots in it. Pure but for `write`."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from markdown_it import MarkdownIt

from bench import results as results_module
from bench.measure import median
from bench.results import Figure, Results
from bench.scenarios import STORE
from bench.targets import ASGI, PEER, QUART, RAMAKV, Verdict, check
from bench.workload import KINDS

CONNECTIONS = 64
COLUMNS = (
    ("per second", "per_second", 0),
    ("p50 ms", "p50_ms", 1),
    ("p99 ms", "p99_ms", 1),
    ("p99.9 ms", "p999_ms", 1),
    ("CPU µs per event", "cpu_us", 0),
    ("RSS MB", "rss_mb", 0),
    ("fsyncs per event", "fsyncs_per_event", 3),
    ("transactions per event", "transactions_per_event", 3),
)


def number(value: float, digits: int) -> str:
    """Return a figure as it is printed; nothing for what was not measured."""
    return "" if math.isnan(value) else f"{value:,.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def targets_table(verdicts: Iterable[Verdict]) -> str:
    """Return what was promised and what came of it."""
    rows = []
    for verdict in verdicts:
        target = verdict.target
        digits = 3 if target.bound < 1 else 2 if target.unit == "×" else 1
        measured = number(verdict.value, digits)
        bound = f"{target.sign} {target.bound:g}{target.unit}"
        shown = f"{measured}{target.unit}" if measured else "–"
        word = verdict.word if verdict.met is not False else f"**{verdict.word}**"
        rows.append([target.what, bound, shown, word])
    return table(["what", "target", "measured", ""], rows)


def ratios_table(results: Results) -> str:
    """Return each kind of event beside floors and peer, at 64 connections.

    Rates, their ratio, and how many times the daemon's CPU time the other needs for an event.
    """
    others = [
        name
        for name in (QUART, ASGI, STORE, PEER)
        if any(results.figure(kind, name, CONNECTIONS) for kind in KINDS)
    ]
    head = ["event", "ramakv per second"]
    head += [column for name in others for column in (f"{name} per second", "ratio", "CPU")]
    rows = []
    for kind in KINDS:
        row = [kind, number(results.value(kind, RAMAKV, CONNECTIONS, "per_second"), 0)]
        for name in others:
            ours, theirs = (kind, RAMAKV, CONNECTIONS), (kind, name, CONNECTIONS)
            row.append(number(results.value(*theirs, "per_second"), 0))
            row.append(number(results.ratio("per_second", ours, theirs), 2))
            row.append(number(results.ratio("cpu_us", theirs, ours), 2))
        rows.append(row)
    return table(head, rows)


def figures_table(figures: Iterable[Figure]) -> str:
    """Return all figures: medians of their rounds."""
    found = list(figures)
    shown = [
        (title, key, digits)
        for title, key, digits in COLUMNS
        if any(not math.isnan(figure.median(key)) for figure in found)
    ]
    head = ["scenario", "contender", "connections", *(title for title, _, _ in shown)]
    rows = [
        [
            figure.scenario,
            figure.contender,
            str(figure.connections),
            *(number(figure.median(key), digits) for _, key, digits in shown),
        ]
        for figure in sorted(found, key=lambda each: (each.scenario, each.contender))
    ]
    return table(head, rows)


def scale_table(results: Results) -> str:
    """Return what many sessions cost."""
    head = [
        *("sessions", "chunks each", "start s", "its CPU s", "database MB", "RSS MB"),
        "RSS KB per session",
        "KB once each had an event",
    ]
    rows = []
    for point in results.scale:
        awake = point.awake_rss_kb_per_session
        rows.append(
            [
                f"{point.sessions:,}",
                f"{point.chunks} of {point.hash_chars} characters",
                number(median(point.start_seconds), 2),
                number(median(point.start_cpu_seconds), 2),
                number(point.database_mb, 0),
                number(point.rss_mb, 0),
                number(point.rss_kb_per_session, 1),
                "" if awake is None else number(awake, 1),
            ]
        )
    return table(head, rows)


def markdown(results: Results) -> str:
    """Return the whole report as Markdown, without plots."""
    machine, options = results.machine, results.options
    packages = ", ".join(f"{name} {v}" for name, v in machine.get("packages", {}).items())
    parts = [
        "# Benchmark of ramakv",
        f"{machine.get('date')}, commit {machine.get('commit')}. {machine.get('cores')} cores of "
        f"{machine.get('cpu')}, {machine.get('memory_mb', 0) / 1000:.0f} GB, Linux "
        f"{machine.get('kernel')}, {machine.get('filesystem')}; load average before "
        f"{machine.get('load_before', math.nan):.2f}, after "
        f"{machine.get('load_after', math.nan):.2f}. Python {machine.get('python')}, SQLite "
        f"{machine.get('sqlite')}, {machine.get('wrk')}, {packages}.",
        f"Medians of {options.get('rounds')} rounds of {options.get('seconds')} s, contenders "
        "alternating; a ratio is the median of the rounds' ratios. Servers on one core, load on "
        "the other.",
        "## Targets",
        targets_table(check(results)),
        "## At 64 connections, side by side",
        ratios_table(results),
        "## All figures",
        figures_table(results.figures),
    ]
    if results.scale:
        parts += ["## Scale", scale_table(results)]
    if results.failures:
        parts += ["## Failures", "\n".join(f"- {failure}" for failure in results.failures)]
    return "\n\n".join(parts) + "\n"


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
td, th { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: left }
figure { margin: 2rem 0 } figure svg { max-width: 100%; height: auto }
"""


def html_page(title: str, text: str, plots: dict[str, str]) -> str:
    """Return Markdown as one HTML page that needs no other file; `plots` are SVGs by title."""
    body = MarkdownIt().enable("table").render(text)
    figures = "".join(
        f"<figure><figcaption>{html.escape(name)}</figcaption>{svg[svg.index('<svg') :]}</figure>"
        for name, svg in plots.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>{body}<h2>Plots</h2>{figures}</html>\n"
    )


def page(results: Results, plots: dict[str, str]) -> str:
    """Return the report as one HTML page; `plots` are SVGs by title."""
    return html_page("Benchmark of ramakv", markdown(results), plots)


def write(results: Results, folder: Path) -> None:
    """Write results.json, report.md, plots and report.html; without matplotlib, no plots."""
    folder.mkdir(parents=True, exist_ok=True)
    results_module.save(results, folder / "results.json")
    (folder / "report.md").write_text(markdown(results))
    plots: dict[str, str] = {}
    try:
        from bench.plots import draw
    except ModuleNotFoundError:
        pass  # `make bench` installs it; the tables need none
    else:
        plots = draw(results, folder)
    (folder / "report.html").write_text(page(results, plots))
