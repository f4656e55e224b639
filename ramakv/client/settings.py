"""Which daemon the client talks to: arguments, then the environment, then a file.

The file is the one that the Rust SDK reads, with its two keys, `daemon_url` and `auth_token`;
others in it are not looked at. As there, a client without an address is switched off.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ramakv.errors import ConfigError

DEFAULT_PATH = "~/.config/ram-a-kv/config.toml"
PATH_VARIABLE = "RAM_A_KV_CLIENT_CONFIG"
URL_VARIABLE = "RAM_A_KV_DAEMON_URL"
TOKEN_VARIABLE = "RAM_A_KV_AUTH_TOKEN"  # noqa: S105 - the name of a variable
CA_FILE_VARIABLE = "RAM_A_KV_CA_FILE"


@dataclass(frozen=True, slots=True)
class Settings:
    """Where events go. `url` is empty where nobody said so: then they go nowhere."""

    url: str = ""
    token: str = ""
    ca_file: str = ""

    def __repr__(self) -> str:
        """Leave the token out."""
        return f"Settings(url={self.url!r}, token={'(set)' if self.token else ''!r})"


def load_settings(
    url: str | None = None,
    token: str | None = None,
    ca_file: str | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Put the settings together; what is given here wins over the environment, that over the file.

    An empty address, wherever it is said, switches the client off. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    given = (url, token, ca_file)
    named = (environ.get(name) for name in (URL_VARIABLE, TOKEN_VARIABLE, CA_FILE_VARIABLE))
    first_url, first_token, first_ca = (
        value if value is not None else variable
        for value, variable in zip(given, named, strict=True)
    )
    found = Settings()
    if first_url is None or first_token is None:
        found = _read(path if path is not None else environ.get(PATH_VARIABLE))
    if first_url is not None and first_url.rstrip("/") != found.url and first_token is None:
        found = replace(found, token="")  # the file's token is for the file's daemon alone
    settings = Settings(
        url=(found.url if first_url is None else first_url).rstrip("/"),
        token=found.token if first_token is None else first_token,
        ca_file=first_ca or "",
    )
    _check(settings)
    return settings


def _read(path: str | os.PathLike[str] | None) -> Settings:
    """Read the file; one that nobody named need not be there."""
    source = Path(DEFAULT_PATH if path is None else path).expanduser()
    try:
        table = tomllib.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if path is None:
            return Settings()
        raise ConfigError(f"cannot read {source}: {error.strerror}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from error
    for key in ("daemon_url", "auth_token"):
        if not isinstance(table.get(key, ""), str):
            raise ConfigError(f"{source}: {key}: expected text, got {table[key]!r}")
    return Settings(url=table.get("daemon_url", "").rstrip("/"), token=table.get("auth_token", ""))


def _check(settings: Settings) -> None:
    if settings.url.startswith("unix:/"):
        return
    try:
        parts = urlsplit(settings.url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if settings.url and not valid:
        raise ConfigError(
            f"daemon_url: expected http://host:port, https://host:port or unix:/path, "
            f"got {settings.url!r}"
        )
    if not settings.token.isascii() or not settings.token.isprintable():
        raise ConfigError("auth_token: expected visible ASCII characters only")
