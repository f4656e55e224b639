"""Style that no other tool holds: lengths, and words that must not be there."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70

BANNED = {
    r"open_memory_channel\S*\(math\.inf": "an unbounded mailbox",
    r"abandon_on_cancel\s*=\s*True": "a thread that nobody waits for",
    r"add_background_task": "a task without an owner",
    r"except BaseException:\s*(pass|continue)": "a cancellation swallowed",
    r"time\.sleep\(": "a stall of the event loop",
    r"INSERT OR REPLACE": "a delete in disguise",
}


def sources() -> list[Path]:
    return sorted((ROOT / "ramakv").rglob("*.py"))


def test_no_file_is_too_long() -> None:
    long = {str(p): n for p in sources() if (n := len(p.read_text().splitlines())) > FILE_LINES_MAX}
    assert not long


def test_no_function_is_too_long() -> None:
    long = [
        f"{path.name}:{node.name}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert not long


def test_no_source_has_what_bites() -> None:
    found = [
        f"{path.name}: {why}"
        for path in sources()
        for pattern, why in BANNED.items()
        if re.search(pattern, path.read_text())
    ]
    assert not found


def test_the_project_speaks_of_itself_alone() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    paths = [ROOT / name for name in listed] or sources()
    words = re.compile("/wor" + "k/|/ro" + r"ot/|index-u" + "rl|/sim" + "ple/", re.IGNORECASE)
    found = [
        str(path)
        for path in paths
        if path.is_file() and words.search(path.read_text(errors="replace"))
    ]
    assert not found
