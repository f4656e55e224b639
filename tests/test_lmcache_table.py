"""The table of endpoints in docs/lmcache.md says what is there, and all of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from ramakv.cli import main
from ramakv.config import Embedded
from ramakv.lmcache.client import LMCacheClient
from ramakv.lmcache.embedded.serving import open_nodes
from ramakv.lmcache.inspecting import LMCacheInspector
from ramakv.lmcache.operating import LMCacheOperator
from tests.lmcache_recordings import RECORDINGS
from tests.test_embedded_document import DOCUMENT
from tests.test_lmcache_operator import CASES
from tests.test_lmcache_real import CASES as REAL_CASES, EXPECTED_DIFFERENCES, NEVER

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "lmcache.md").read_text()

NOT_OF_THE_DOCUMENT = {
    "POST /memory/prefetch",
    "POST /memory/evict",
    "POST /memory/query",
    "GET /metrics",
}

ASK_NOTHING = {"serve"}
"""Commands of the group that are no call to an LMCache."""


class Row(NamedTuple):
    """One line of the table."""

    endpoint: str
    methods: str
    module: str
    command: str
    document: str
    recording: str
    real: str


def quoted(cell: str) -> list[str]:
    return re.findall("`([^`]*)`", cell)


def read_rows() -> list[Row]:
    section = TEXT.split("## Every endpoint")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


ROWS = read_rows()
IDS = [row.endpoint for row in ROWS]
each_row = pytest.mark.parametrize("row", ROWS, ids=IDS)


def endpoint_of(method: str, target: str) -> str:
    return f"{method} {target.partition('?')[0]}"


def public_methods(kind: type) -> set[str]:
    return {
        name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))
    }


def names_of_tests() -> set[str]:
    return {
        node.name
        for path in (ROOT / "tests").glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


TESTS = names_of_tests()


@each_row
def test_no_cell_is_empty(row: Row) -> None:
    assert all(row)


def test_each_endpoint_of_the_document_is_there_once() -> None:
    documented = {endpoint_of(call.method, call.target) for call in DOCUMENT}
    assert len(IDS) == len(set(IDS))
    assert set(quoted(" ".join(IDS))) == documented | NOT_OF_THE_DOCUMENT


def test_each_method_of_the_clients_is_there_and_exists() -> None:
    methods = {
        name
        for kind in (LMCacheClient, LMCacheOperator, LMCacheInspector)
        for name in public_methods(kind)
    }
    assert {name for row in ROWS for name in quoted(row.methods)} == methods


async def test_the_embedded_engine_serves_each_where_the_table_says(tmp_path: Path) -> None:
    async with open_nodes(Embedded(), disk_dir=tmp_path) as nodes:
        for app in nodes.apps():
            served = {
                f"{method} {rule.rule}"
                for rule in app.url_map.iter_rules()
                for method in rule.methods or ()
            }
            assert {row.endpoint.strip("`") for row in ROWS} <= served
    for row in ROWS:
        module = ROOT / "ramakv/lmcache/embedded" / row.module.strip("`")
        assert f'"{row.endpoint.strip("`").split()[1]}"' in module.read_text()


@each_row
def test_each_command_exists(row: Row) -> None:
    [command] = quoted(row.command)
    program, *words = command.split()
    found: click.Command = main
    assert program == "ramakv"
    for word in words:
        if isinstance(found, click.Group):
            found = found.commands[word]
        else:
            choices = [p.type.choices for p in found.params if isinstance(p.type, click.Choice)]
            assert any(word in words_of_one for words_of_one in choices), command
    assert not isinstance(found, click.Group)


def test_each_command_of_the_group_is_there() -> None:
    group = main.commands["lmcache"]
    assert isinstance(group, click.Group)
    there = {" ".join(command.split()[2:]) for row in ROWS for command in quoted(row.command)}
    assert set(group.commands) >= ASK_NOTHING
    for name in group.commands.keys() - ASK_NOTHING:
        command = group.commands[name]
        if isinstance(command, click.Group):
            assert {f"{name} {inner}" for inner in command.commands} <= there
        else:
            assert any(words == name or words.startswith(f"{name} ") for words in there), name


@each_row
def test_each_test_exists(row: Row) -> None:
    named = quoted(row.document) + quoted(row.recording)
    assert all(name.startswith("test_") for name in named)
    assert set(named) <= TESTS


@each_row
def test_what_is_said_to_be_checked_is_checked(row: Row) -> None:
    """The tests named have the endpoint among their cases."""
    endpoint = row.endpoint.strip("`")
    documented = quoted(row.document)
    if "test_every_call_of_the_document" in documented:
        assert endpoint in {endpoint_of(call.method, call.target) for call in DOCUMENT}
    if "test_a_call_is_made_and_understood_as_documented" in documented:
        assert endpoint in {endpoint_of(*case.request.split()) for case in CASES}
    recorded = {endpoint_of(call.method, call.target) for call in RECORDINGS.values()}
    assert (row.recording != "not recorded") == (endpoint in recorded)


@each_row
def test_what_is_said_of_the_real_one_is_what_its_test_expects(row: Row) -> None:
    asked = [case for case in REAL_CASES if case.method in quoted(row.methods)]
    if row.real.startswith("never asked"):
        assert not asked
        assert set(quoted(row.methods)) <= NEVER
    elif row.real == "yes":
        assert any(case.refused is None for case in asked)
    else:
        statuses = {case.refused for case in asked}
        memory = row.real == "no /memory routes"
        assert statuses == {404 if memory else int(row.real.removeprefix("refuses: "))}


def test_each_difference_that_is_expected_is_explained() -> None:
    section = TEXT.split("## Where the embedded engine differs")[1].split("\n## ")[0]
    paths = set(re.findall(r"`(?:GET|POST) (/[^`]*)`", section))
    endpoints = {name: row.endpoint.strip("`") for row in ROWS for name in quoted(row.methods)}
    methods = {case.name: case.method for case in REAL_CASES}
    expected = {endpoints[methods[name]].split()[1] for name, _ in EXPECTED_DIFFERENCES}
    assert paths | {"/memory/evict", "/memory/query"} == expected
    assert f"Among {len(REAL_CASES)} calls" in section
