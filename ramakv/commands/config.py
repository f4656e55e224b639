"""`ramakv config`: what is in force, and whether it is usable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from ramakv.config import Config
from ramakv.config_file import load_config
from ramakv.web.tls import load_certificate


def show(config_path: str | None) -> int:
    """Print the configuration as TOML that could be its file; the token is not shown."""
    config = load_config(config_path)
    for line in as_toml(config):
        click.echo(line)
    return 0


def check(config_path: str | None) -> int:
    """Say that the configuration is usable. Raises ConfigError where it is not."""
    config = load_config(config_path)
    if config.is_https:
        load_certificate(config.tls)
    admin = config.admin.listen_addr
    click.echo(
        f"ok: listens on {config.listen_addr}{' with TLS' if config.is_https else ''}, "
        f"{f'for operators on {admin}' if admin else 'not for operators'}, "
        f"backend {config.backend_kind}, database {config.store_path}"
    )
    return 0


def as_toml(config: Config) -> Iterator[str]:
    """Write a configuration, one key a line."""
    table = msgspec.to_builtins(config)
    if table["auth_token"]:
        table["auth_token"] = "" if config.auth_token_file else "(set)"
    sections = {name: value for name, value in table.items() if isinstance(value, dict)}
    for name, value in table.items():
        if name not in sections:
            yield f"{name} = {_toml_value(value)}"
    for section, keys in sections.items():
        yield ""
        yield f"[{section}]"
        for name, value in keys.items():
            yield f"{name} = {_toml_value(value)}"


def _toml_value(value: Any) -> str:
    # JSON's strings, numbers, booleans and arrays are TOML's.
    return json.dumps(value, ensure_ascii=False)
