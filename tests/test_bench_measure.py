"""The benchmark's arithmetic: percentiles, medians, ratios, targets, tables."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench import report, results as results_module
from bench.measure import CURVE_PERCENTILES, at, curve, median, percentile, ratio
from bench.results import Results, ScalePoint
from bench.targets import (
    ARRAYS,
    DISTINCT_CHUNKS,
    DISTINCT_SESSIONS,
    FAST,
    PEER,
    QUART,
    RAMAKV,
    SLOW,
    TARGETS,
    Verdict,
    check,
)


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 1), (50, 50), (99, 99), (99.9, 100), (100, 100)]
)
def test_a_percentile_is_the_nearest_rank(percent: float, expected: float) -> None:
    assert percentile(range(1, 101), percent) == expected


def test_of_few_values_the_tail_is_the_largest() -> None:
    assert percentile([1.0, 2.0, 9.0], 99) == 9.0
    assert percentile([4.0], 1) == 4.0
    assert math.isnan(percentile([], 50))


def test_a_curve_is_in_order_and_ends_with_the_largest() -> None:
    found = curve([3.0, 1.0, 2.0] * 1000)
    assert len(found) == len(CURVE_PERCENTILES)
    assert found == sorted(found)
    assert (at(found, 50.0), found[-1]) == (2.0, 3.0)


def test_a_median_leaves_out_what_was_not_measured() -> None:
    assert median([3.0, math.nan, 1.0, 2.0]) == 2.0
    assert math.isnan(median([math.nan]))


def test_a_ratio_is_that_of_rounds_not_of_medians() -> None:
    """A machine that slows down in the middle changes both sides of a round alike."""
    ours, theirs = [100.0, 20.0, 100.0, 10.0, 10.0], [50.0, 10.0, 50.0, 5.0, 5.0]
    assert ratio(ours, theirs) == 2.0
    assert ratio([100.0, 20.0, 10.0], [5.0, 10.0, 50.0]) == 2.0  # of medians it is 2.0 as well
    assert ratio([1.0, 9.0, 9.0], [1.0, 1.0, 9.0]) == 1.0  # of medians it would be 9.0


def test_a_ratio_to_nothing_is_left_out() -> None:
    assert ratio([4.0, 6.0], [0.0, 2.0]) == 3.0
    assert math.isnan(ratio([1.0], []))


def verdict_on(results: Results, beginning: str) -> Verdict:
    found = [each for each in check(results) if each.target.what.startswith(beginning)]
    assert len(found) == 1
    return found[0]


def test_nothing_measured_meets_no_target() -> None:
    verdicts = check(Results())
    assert len(verdicts) == len(TARGETS) == 15
    assert {verdict.met for verdict in verdicts} == {None}
    assert "--peer" in verdict_on(Results(), "turn_end p99 against the peer").word


@pytest.mark.parametrize(
    ("ours", "theirs", "met"), [(2000.0, 1000.0, True), (1999.0, 1000.0, False)]
)
def test_a_rate_meets_its_target_from_the_bound_on(ours: float, theirs: float, met: bool) -> None:
    results = Results()
    for _ in range(5):
        results.add("health", RAMAKV, 64, {"per_second": ours})
        results.add("health", QUART, 64, {"per_second": theirs})
    assert verdict_on(results, "health req/s").met is met


def test_a_latency_meets_its_target_up_to_the_bound() -> None:
    results = Results()
    results.add("turn_end", FAST, 64, {"p99_ms": 100.0})
    results.add("turn_end", SLOW, 64, {"p99_ms": 120.0})
    results.add("turn_end", RAMAKV, 64, {"p99_ms": 71.0, "fsyncs_per_event": 0.2})
    results.add("turn_end", PEER, 64, {"p99_ms": 100.0})
    assert verdict_on(results, "turn_end p99 with an LMCache").met is True
    assert verdict_on(results, "turn_end p99 against the peer").met is False
    assert verdict_on(results, "fsyncs").met is False


def test_arrays_are_held_against_single_events() -> None:
    results = Results()
    results.add("turn_end", RAMAKV, 64, {"per_second": 500.0})
    results.add(ARRAYS, RAMAKV, 16, {"per_second": 2600.0})
    verdict = verdict_on(results, "turn_end events/s in arrays")
    assert (verdict.value, verdict.met) == (5.2, True)


def test_memory_is_that_of_sessions_that_had_an_event() -> None:
    point = ScalePoint(DISTINCT_SESSIONS, DISTINCT_CHUNKS, 64, [2.0, 9.0, 2.4], 140, 400, 30, 60)
    results = Results(scale=[point])
    assert verdict_on(results, "RSS").value == 60
    assert verdict_on(results, "RSS").met is False
    assert verdict_on(results, "start-up").value == 2.4
    assert verdict_on(results, "start-up").met is True


def test_a_table_is_markdown() -> None:
    assert report.table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_the_report_says_what_was_measured_and_what_failed() -> None:
    results = Results(failures=["turn_end, peer: 3 answers were not 200"])
    for rate in (1500.0, 2000.0, 2500.0):
        results.add(
            "health", RAMAKV, 64, {"per_second": rate, "p50_ms": 1.0, "cpu_us": 300}, curve([1.0])
        )
        results.add("health", QUART, 64, {"per_second": 1000.0, "cpu_us": 900.0})
    text = report.markdown(results)
    assert "| health | 2,000 | 1,000 | 2.00 | 3.00 |" in text
    assert "| ≥ 2× | 2.00× | met |" in text
    assert "| health | ramakv | 64 | 2,000 | 1.0 |" in text
    assert "- turn_end, peer: 3 answers were not 200" in text


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = report.page(Results(), {"A < B": '<?xml version="1.0"?>\n<svg>plot</svg>'})
    assert "A &lt; B" in page
    assert "<svg>plot</svg>" in page
    assert "<?xml" not in page
    assert not {"http://", "https://", "<script", "<link", "<img"} & set(page.split('"'))
    assert "src=" not in page


def test_results_survive_their_file(tmp_path: Path) -> None:
    results = Results(machine={"cores": 2})
    results.add("health", RAMAKV, 64, {"per_second": 1234.5, "cpu_us": math.nan}, [1.0, 2.0])
    results_module.save(results, tmp_path / "results.json")
    found = results_module.load(tmp_path / "results.json")
    assert found == results
    assert "cpu_us" not in found.figures[0].rounds[0]


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    results_module.save(Results(schema="ramakv-bench/0"), tmp_path / "results.json")
    with pytest.raises(ValueError, match="expected ramakv-bench/1"):
        results_module.load(tmp_path / "results.json")
