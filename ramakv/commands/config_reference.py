"""`ramakv config reference`: every key, from the structs, with its meaning from config.toml."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec.inspect import (
    BoolType,
    Field,
    FloatType,
    IntType,
    LiteralType,
    StrType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

import ramakv
from ramakv.config import Config

_HEAD = """\
# Configuration

One TOML file: `--config FILE`, else `$RAM_A_KV_CONFIG`, else `/etc/ram-a-kv/config.toml`, else
none, and the defaults hold. The environment wins over the file: `RAMAKV_LISTEN_ADDR` sets
`listen_addr`, and `RAMAKV_BACKEND__KIND` sets `kind` in `[backend]`. A file that cannot be parsed,
a key that does not exist and a value that cannot be stop the start with one line and exit code 2;
`ramakv config check` says so before, `ramakv config show` prints what is in force.
[config.toml](../config.toml) is a file with every key. This page is what `ramakv config reference`
prints; the Rust daemon's keys are those at the top level.
"""
_UNITS = {
    "_seconds": "s",
    "_seconds_max": "s",
    "_bytes": "bytes",
    "_bytes_max": "bytes",
    "_chars_max": "characters",
    "_per_second": "1/s",
    "_pages": "pages",
    "_ms": "ms",
    "_share": "share",
}


def run() -> int:
    """Print the page."""
    click.echo("\n".join(_page()))
    return 0


def read_meanings() -> dict[str, str]:
    """Read what config.toml says about each key, by its dotted name."""
    package = Path(ramakv.__file__).parent
    # A wheel carries the file inside the package; in the source tree it lies beside it.
    path = next(p for p in (package / "config.toml", package.parent / "config.toml") if p.exists())
    meanings: dict[str, str] = {}
    section, comment = "", []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            comment.append(line.removeprefix("# "))
            continue
        if found := re.fullmatch(r"\[(\w+)\]", line):
            section = f"{found[1]}."
        elif found := re.match(r"(\w+) = ", line):
            meanings[section + found[1]] = re.sub(r" Default: .*", "", " ".join(comment))
        comment = []
    return meanings


def _page() -> Iterator[str]:
    info = type_info(Config)
    assert isinstance(info, StructType)
    meanings, defaults = read_meanings(), msgspec.to_builtins(Config())
    sections = [field for field in info.fields if isinstance(field.type, StructType)]
    keys = [field for field in info.fields if field not in sections]
    yield _HEAD
    yield "## Top level\n"
    yield from _table("", keys, defaults, meanings)
    for section in sections:
        assert isinstance(section.type, StructType)
        yield f"\n## [{section.name}]\n"
        yield f"{inspect.getdoc(section.type.cls)}\n"
        found = defaults[section.name]
        yield from _table(f"{section.name}.", section.type.fields, found, meanings)


def _table(
    prefix: str, fields: Any, defaults: dict[str, Any], meanings: dict[str, str]
) -> Iterator[str]:
    yield "| key | type | default | bounds | unit | meaning |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for field in fields:
        cells = (
            f"`{field.name}`",
            _name(field.type),
            f"`{json.dumps(defaults[field.name], ensure_ascii=False)}`",
            _bounds(field.type),
            _unit(field),
            meanings[prefix + field.name],
        )
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _name(kind: Type) -> str:
    match kind:
        case BoolType():
            return "boolean"
        case IntType():
            return "integer"
        case FloatType():
            return "number"
        case StrType():
            return "text"
        case LiteralType():
            return "one of"
        case VarTupleType():
            return "list of texts"
        case UnionType(types=types):
            return ", or ".join(map(_name, types))
    raise AssertionError(kind)


def _bounds(kind: Type) -> str:
    match kind:
        case LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in values)
        case UnionType(types=types):
            return ", or ".join(filter(None, map(_bounds, types)))
        case VarTupleType(min_length=int(least)):
            return f"at least {least}"
        case IntType() | FloatType():
            signs = {"> ": kind.gt, "≥ ": kind.ge, "< ": kind.lt, "≤ ": kind.le}
            return ", ".join(f"{s}{_figure(v)}" for s, v in signs.items() if v is not None)
    return ""


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else str(value)


def _unit(field: Field) -> str:
    return next((unit for end, unit in _UNITS.items() if field.name.endswith(end)), "")
