"""The README does what it says, and its Chinese twin says the same."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx
import pytest

from ramakv.cli import main as command_line
from tests.daemons import running_daemon

ROOT = Path(__file__).parent.parent
READMES = ["README.md", "README.zh-CN.md"]


def code_blocks(name: str) -> list[str]:
    return re.findall(r"```\w*\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def round_trip(name: str) -> list[tuple[str, str]]:
    """Each curl command of the quick start, with the reply that is printed below it."""
    block = next(block for block in code_blocks(name) if block.startswith("URL="))
    return re.findall(r"^(curl .*)\n(\{.*\})$", block, flags=re.MULTILINE)


@pytest.mark.parametrize("name", READMES)
def test_the_round_trip_answers_byte_for_byte_what_is_printed(name: str, tmp_path: Path) -> None:
    steps = round_trip(name)
    assert len(steps) == 5
    with running_daemon(tmp_path) as daemon:
        for _ in range(2):  # somebody may do it twice
            for command, expected in steps:
                script = f"URL={daemon.url}/event\n{command}"
                done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
                assert done.stdout.decode() == expected


def test_both_have_the_same_commands_keys_and_replies() -> None:
    def without_comments(name: str) -> list[str]:
        lines = [
            line.split(" #")[0].rstrip()
            for block in code_blocks(name)
            for line in block.splitlines()
        ]
        return [line for line in lines if line and not line.startswith("#")]

    assert without_comments(READMES[0]) == without_comments(READMES[1])


@pytest.mark.parametrize("pattern", [r"^#+ ", r"^\| ", r"\]\((?!README)[^)]*\)"])
def test_both_have_the_same_structure(pattern: str) -> None:
    counts = [
        len(re.findall(pattern, (ROOT / name).read_text(), flags=re.MULTILINE)) for name in READMES
    ]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", READMES)
def test_every_link_leads_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target


@pytest.mark.parametrize("name", READMES)
def test_every_command_of_the_table_exists(name: str) -> None:
    named = set(re.findall(r"`ramakv ([a-z]+)", (ROOT / name).read_text()))
    assert named == set(command_line.commands)  # type: ignore[attr-defined]


def test_the_readme_starts_with_two_make_commands() -> None:
    first = code_blocks("README.md")[0]
    assert re.findall(r"^make \w+", first, flags=re.MULTILINE) == ["make run", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    for target in ("run", "test", "check", "crash", "install"):
        assert f"\n{target}: " in makefile


def test_the_httpx_client_is_the_one_of_the_lock() -> None:
    lock = (ROOT / "requirements" / "lock.txt").read_text()
    assert f"httpx=={httpx.__version__}" in lock
    assert "http://" not in lock
    assert "https://" not in lock
    for line in re.findall(r"^[a-z].*$", lock, flags=re.MULTILINE):
        assert "==" in line
