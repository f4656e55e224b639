"""Alerts, runbook and dashboard: they ask for what there is, and each alert has its advice."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from tests.fakes import open_agent
from tests.test_metrics import families, with_hot

ROOT = Path(__file__).parent.parent
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
ALERT_TESTS = ROOT / "tests" / "alerts.test.yml"
RUNBOOK = ROOT / "docs" / "runbook.md"
METRICS = ROOT / "docs" / "metrics.md"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "ramakv.json").read_text())

OF_PROMETHEUS = {"job", "instance", "le"}


def alerts() -> dict[str, str]:
    """Text of each alert, by its name."""
    _, *parts = ALERTS.read_text().split("- alert: ")
    return {name: rest for name, _, rest in (part.partition("\n") for part in parts)}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    """Every expression of the dashboard, as Prometheus gets it."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]]
    found += [
        re.sub(r"label_values\((.*), \w+\)", r"\1", variable["definition"])
        for variable in DASHBOARD["templating"]["list"]
        if variable["type"] == "query"
    ]
    filled = {"$__rate_interval": "1m", "$instance": ".*", "$job": ".*"}
    for name, value in filled.items():
        found = [query.replace(name, value) for query in found]
    return found


def selectors(text: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Names of metrics, with the label, operator and value of each matcher."""
    for name, matchers in re.findall(r"\b((?:ramakv|process)_\w+)(?:\{([^}]*)\})?", text):
        yield name, re.findall(r'(\w+)(=~|!=|!~|=)"([^"]*)"', matchers)


async def test_everything_asks_for_metrics_and_labels_that_there_are(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    samples: dict[str, list[dict[str, str]]] = {}
    async with open_agent(tmp_path) as agent:
        for family in await families(with_hot(agent.service)):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample.labels)
    asked = 0
    for text in (*alerts().values(), *queries(), METRICS.read_text(), RUNBOOK.read_text()):
        for name, matchers in selectors(re.sub(r"`_\w+`|summary:.*", "", text)):
            asked += 1
            there = samples.get(name) or samples.get(f"{name}_bucket")  # a table names it whole
            assert there, f"{name} is no metric"
            for label, operator, value in matchers:
                if label in OF_PROMETHEUS:
                    continue
                values = {sample[label] for sample in there}
                wanted = value.replace("\\", "").split("|") if "~" in operator else [value]
                assert values >= set(wanted) - {".*"}, f"{name}: {label}{operator}{value}"
    assert asked > 100


def test_each_alert_has_its_section_of_the_runbook_and_each_section_its_alert() -> None:
    _, *sections = re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE)
    titles = [section.split("\n")[0] for section in sections]
    assert titles == list(alerts())
    for name, text in alerts().items():
        assert f"runbook: docs/runbook.md#{name.lower()}\n" in text
        assert re.search(r"severity: (critical|warning)", text)
        assert "summary:" in text
    for section in sections:
        assert re.findall(r"^\*\*(.+?)\*\*:", section, re.MULTILINE) == [
            "You see",
            "It means",
            "Do",
        ], section


def test_the_runbook_speaks_of_alerts_and_keys_that_there_are() -> None:
    text = RUNBOOK.read_text()
    assert set(re.findall(r"\bRamakv\w+", text)) == set(alerts())
    configuration = (ROOT / "config.toml").read_text()
    for section, key in re.findall(r"`(limits|backend|eviction|sessions|store)\.(\w+)[` ]", text):
        part = configuration.partition(f"\n[{section}]\n")[2].partition("\n[")[0]
        assert f"\n{key} = " in part, f"{section}.{key}"


def test_each_alert_is_tested_both_ways() -> None:
    text = ALERT_TESTS.read_text()
    fires = set(re.findall(r"alertname: (\w+)\n +eval_time: \w+\n +exp_alerts:\n", text))
    is_quiet = set(re.findall(r"alertname: (\w+), eval_time: \w+, exp_alerts: \[\]", text))
    assert fires == set(alerts())
    assert is_quiet >= fires - {"RamakvDiskSlow"}  # as RamakvTurnEndSlow, beside it


@pytest.mark.parametrize(
    "arguments", [["check", "rules", str(ALERTS)], ["test", "rules", str(ALERT_TESTS)]]
)
def test_prometheus_takes_the_alerts_and_they_fire_when_they_should(arguments: list[str]) -> None:
    assert promtool(*arguments) == 0


def test_prometheus_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"r:{n}", "expr": expr} for n, expr in enumerate(queries())]
    path = tmp_path / "queries.yml"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    assert len(rules) > 30
    assert promtool("check", "rules", str(path)) == 0


def promtool(*arguments: str) -> int:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed; Debian has it in its package prometheus")
    return subprocess.run([program, *arguments], timeout=60, check=False).returncode


def test_panels_have_room_and_names_of_their_own() -> None:
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    assert len({panel["title"] for panel in everything}) == len(everything)
    taken: Counter[tuple[int, int]] = Counter()
    for panel in everything:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or place["w"] >= 4
        taken.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
    assert set(taken.values()) == {1}
    assert len(taken) == 24 * (1 + max(y for _, y in taken)), "there is a gap"


def test_every_metric_of_ours_is_on_the_dashboard() -> None:
    documented = set(re.findall(r"^\| `(ramakv_\w+)`", METRICS.read_text(), re.MULTILINE))
    shown = {name.removesuffix("_bucket") for query in queries() for name, _ in selectors(query)}
    missing = {name for name in documented if name not in shown and f"{name}_count" not in shown}
    assert missing == {"ramakv_dead_letters_dropped_total"}
