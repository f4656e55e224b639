"""`/cache/load-fs-chunks`: chunk files from a folder into the hot tier.

The folder is named by an LMCache configuration file, of which only the top-level keys are read:
lines `key: value` with plain or quoted scalars, comments, and anything indented left out; or a
JSON object, which is YAML too. `remote_url` must be `fs://host:port/path` or `file:///path`.
The files are those that the disk and remote tiers of this engine write.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from ramakv.lmcache.embedded.engine import Engine
from ramakv.lmcache.embedded.files import read_chunk_file

CONFIG_BYTES_MAX = 1024 * 1024
FILES_PER_HOP_MAX = 64

_LINE = re.compile(r"""([A-Za-z_][\w.-]*)\s*:(?:\s+(.*))?$""")
_QUOTED = re.compile(r"""(?:"([^"]*)"|'([^']*)')\s*(?:#.*)?$""")


class ConfigFileError(Exception):
    """The configuration file cannot be read; `detail` is the system's word on it."""

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.detail = detail


class NoRemoteError(Exception):
    """The configuration names no folder."""


class Loaded(NamedTuple):
    """What a load did."""

    chunks: int
    files: int
    """All that are in the folder, more than `max_chunks` or not."""
    failed_keys: list[str]


async def load_fs_chunks(engine: Engine, config_path: str, max_chunks: int | None) -> Loaded:
    """Load chunks into the hot tier; one that is there counts as loaded.

    Raises ConfigFileError, NoRemoteError, and OSError when the folder cannot be read.
    """
    folder = _folder(await engine.run_sync(partial(_read_config, config_path)))
    names = await engine.run_sync(partial(_file_names, folder))
    wanted = names if max_chunks is None else names[:max_chunks]
    loaded = 0
    failed: list[str] = []
    for start in range(0, len(wanted), FILES_PER_HOP_MAX):
        some = wanted[start : start + FILES_PER_HOP_MAX]
        for name, found in zip(
            some, await engine.run_sync(partial(_read_chunks, folder, some)), strict=True
        ):
            if found is None:
                failed.append(os.fsencode(Path(name).stem).decode("utf-8", "replace"))
            elif engine.admit(*found):
                loaded += 1
    return Loaded(loaded, len(names), failed)


def parse_config(text: str) -> dict[str, Any]:
    """Return the top-level scalars of a configuration. Raises ValueError when it is none."""
    if text.lstrip().startswith("{"):
        found: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        return found
    values: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line[0] in " \t#-" or line.startswith(("---", "...")):
            continue
        match = _LINE.match(line.rstrip())
        if match is None:
            raise ValueError(f"line {number}: expected 'key: value'")
        values[match[1]] = _scalar((match[2] or "").strip())
    return values


def _scalar(text: str) -> str | None:
    if quoted := _QUOTED.match(text):
        return quoted[1] if quoted[1] is not None else quoted[2]
    plain = "" if text.startswith("#") else re.split(r"\s#", text, maxsplit=1)[0].strip()
    return None if plain in ("", "~", "null", "Null", "NULL") else plain


def _read_config(config_path: str) -> dict[str, Any]:
    try:
        with open(config_path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("not a file")
            content = file.read(CONFIG_BYTES_MAX + 1)
        if len(content) > CONFIG_BYTES_MAX:
            raise ValueError(f"larger than {CONFIG_BYTES_MAX} bytes")
        return parse_config(content.decode("utf-8"))
    except FileNotFoundError as error:
        raise ConfigFileError("Configuration file not found", str(error)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigFileError(f"Invalid configuration file: {error}", str(error)) from error


def _folder(config: dict[str, Any]) -> Path:
    url = config.get("remote_url")
    if not isinstance(url, str):
        raise NoRemoteError("remote_url is not set in the configuration file")
    wrong = NoRemoteError(f"remote_url must be fs://host:port/path, got {url!r}")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise wrong from error
    path = unquote(parts.path)
    if parts.scheme not in ("fs", "file") or not path.startswith("/") or "\0" in path:
        raise wrong
    return Path(path)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would be waited for


def _file_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_file())


def _read_chunks(folder: Path, names: Sequence[str]) -> list[tuple[str, bytes] | None]:
    found: list[tuple[str, bytes] | None] = []
    for name in names:
        try:
            found.append(read_chunk_file(folder / name))
        except (OSError, ValueError):
            found.append(None)
    return found
