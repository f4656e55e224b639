"""The documents: links lead somewhere, commands exist, twins say the same, tables are current."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from ramakv import events
from ramakv.cli import main

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("docs", "examples", "bench")
    for path in (ROOT / folder).glob("*.md")
)
TWINS = [
    ("docs/quickstart.md", "docs/quickstart.zh-CN.md"),
    ("docs/events.md", "docs/events.zh-CN.md"),
]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    titles = re.findall(r"^#+ (.+)$", without_code(path.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(page))):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), target


def commands_in(text: str) -> list[list[str]]:
    """Every command line of ramakv: in code blocks to the line's end, inline in backticks."""
    found = re.findall(
        r"^(?:\S*/)?ramakv ([^\n]*)$",
        "\n".join(re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)),
        flags=re.MULTILINE,
    )
    found += re.findall(r"`ramakv ([^`\n]+)`", without_code(text))
    lines = (re.split(r"\s[|>#]", line)[0].replace("…", "") for line in found)
    return [shlex.split(line) for line in lines]


def parse(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """Read a command line as `ramakv` would, without running it."""
    # With its parent, from which it has `-h`: click keeps what it finds out here for good.
    context = command.make_context("ramakv", list(words), parent=parent, resilient_parsing=True)
    if not isinstance(command, click.Group):
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        for word in words:
            if word.startswith("-"):
                assert word in known | {"-h", "--help"}, f"{command.name}: {word}"
        return
    rest = [*context._protected_args, *context.args]
    if rest:
        found = command.get_command(context, rest[0])
        assert found is not None, f"{command.name} has no {rest[0]}"
        parse(found, rest[1:], context)


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md", "SECURITY.md", *PAGES])
def test_every_command_line_is_one_that_ramakv_knows(page: str) -> None:
    for words in commands_in(text_of(page)):
        parse(main, words)


def test_the_check_of_command_lines_finds_what_is_wrong() -> None:
    assert commands_in("`ramakv serve --x` and\n```sh\n.venv/bin/ramakv demo  # now\n```") == [
        ["demo"],
        ["serve", "--x"],
    ]
    for wrong in (["serfe"], ["config", "shows"], ["serve", "--x"]):
        with pytest.raises(AssertionError):
            parse(main, wrong)


@pytest.mark.parametrize("twins", TWINS)
@pytest.mark.parametrize(
    "pattern", [r"^#+ ", r"^\| ", r"^```", r"\]\((?!\w+(?:\.zh-CN)?\.md\))[^)]*\)"]
)
def test_twins_have_the_same_structure(twins: tuple[str, str], pattern: str) -> None:
    counts = [len(re.findall(pattern, text_of(page), flags=re.MULTILINE)) for page in twins]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("page", TWINS[1])
def test_the_event_reference_names_every_field_of_every_event(page: str) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", text_of(page), flags=re.MULTILINE))
    assert set(rows) == {*events.EVENTS, "list_events"}
    for type_, kind in events.EVENTS.items():
        needs, takes, answers = (re.findall(r"`(\w+)`", cell) for cell in rows[type_].split("|"))
        fields = kind.__struct_fields__
        required = {f.name for f in _fields(kind) if f.required}
        assert set(needs) == required
        assert set(takes) == set(fields) - required
        data = getattr(events, f"{kind.__name__}Data")
        assert answers == list(data.__struct_fields__)


def _fields(kind: type[events.Event]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def test_the_configuration_reference_is_what_the_command_prints() -> None:
    printed = CliRunner().invoke(main, ["config", "reference"])
    assert printed.exit_code == 0, printed.output
    expected = text_of("docs/configuration.md")
    assert printed.output == expected, "run: ramakv config reference > docs/configuration.md"
    keys = re.findall(r"^\| `(\w+)` \| .* \| (.+) \|$", expected, flags=re.MULTILINE)
    assert len(keys) > 60
    assert all(
        meaning[0].isupper() or meaning[0] in "…abcdefghijklmnopqrstuvwxyz" for _, meaning in keys
    )
