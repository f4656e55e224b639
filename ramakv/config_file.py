"""Reads the configuration: a TOML file, then the environment, checked before anything starts."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import msgspec

from ramakv.config import Config, Section, resolve_path
from ramakv.errors import ConfigError
from ramakv.private_files import read_private

DEFAULT_CONFIG_PATH = "/etc/ram-a-kv/config.toml"
CONFIG_PATH_VARIABLE = "RAM_A_KV_CONFIG"
ENVIRONMENT_PREFIX = "RAMAKV_"

_is_token = re.compile(r"[!-~]+").fullmatch  # what an Authorization header can carry


def load_config(
    path: str | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Read the configuration: file, then environment, then `overrides` (dotted keys), then checks.

    The file is `path`, else what `RAM_A_KV_CONFIG` names, else `/etc/ram-a-kv/config.toml`
    if there is one, else none: the defaults hold. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    named = path or environ.get(CONFIG_PATH_VARIABLE)
    source = named or DEFAULT_CONFIG_PATH
    table = _read_table(source) if named or Path(source).exists() else {}
    _refuse_unknown_keys(table, source)
    for name, raw in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX):
            _put(table, _dotted(name), _environment_value(_dotted(name), raw), name)
    for dotted, value in (overrides or {}).items():
        _put(table, dotted, value, dotted)
    try:
        config = msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(error, source)) from error
    _refuse_impossible_values(config)
    return msgspec.structs.replace(config, auth_token=read_token(config))


def _read_table(source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read configuration file {source}: {error.strerror}; "
            f"name another with --config or {CONFIG_PATH_VARIABLE}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from error


def _fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _refuse_unknown_keys(table: Mapping[str, Any], source: str) -> None:
    known = _fields(Config)
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{source}: unknown key {key!r}{_hint(key, known)}")
        if not _is_section(known[key]):
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{source}: {key} is a section; write it as [{key}]")
        for name in value:
            if name not in _fields(known[key]):
                raise ConfigError(
                    f"{source}: unknown key {name!r} in [{key}]{_hint(name, _fields(known[key]))}"
                )


def _hint(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"


def _dotted(variable: str) -> str:
    return variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".", 1)


def _kind_of(dotted: str) -> Any:
    """Type of a key, or None where there is no such key."""
    section, _, name = dotted.rpartition(".")
    parent: Any = _fields(Config).get(section) if section else Config
    return _fields(parent).get(name) if _is_section(parent) else None


def _environment_value(dotted: str, raw: str) -> Any:
    """A string key takes the text as it is; any other key takes what TOML would make of it."""
    if _kind_of(dotted) is str:
        return raw
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw  # a bare word, such as noop


def _put(table: dict[str, Any], dotted: str, value: Any, origin: str) -> None:
    section, _, name = dotted.rpartition(".")
    kind = _kind_of(dotted)
    if kind is None or _is_section(kind):
        keys = [
            f"{key}.{inner}" if _is_section(kind) else key
            for key, kind in _fields(Config).items()
            for inner in (_fields(kind) if _is_section(kind) else [""])
        ]
        near = difflib.get_close_matches(dotted, keys, n=1, cutoff=0.5)
        meant = ENVIRONMENT_PREFIX + near[0].upper().replace(".", "__") if near else ""
        raise ConfigError(f"{origin}: no such key" + (f"; did you mean {meant}?" if meant else ""))
    (table.setdefault(section, {}) if section else table)[name] = value


def _explain(error: msgspec.ValidationError, source: str) -> str:
    """Turn msgspec's "Expected `int`, got `str` - at `$.limits.x`" into a line for people."""
    what, _, where = str(error).partition(" - at `$.")
    key = where.rstrip("`")
    what = what.replace("`", "").replace("Expected ", "expected ", 1)
    if what.startswith("Invalid enum value"):
        choices = " | ".join(get_args(_kind_of(key)))
        what = f"expected {choices}, got {what.removeprefix('Invalid enum value ')}"
    return f"{key or source}: {what} (from {source} or the environment)"


def _refuse_impossible_values(config: Config) -> None:
    _check_listen_addrs(config)
    url = urlsplit(config.lmcache_url)
    try:
        valid = url.scheme == "http" and bool(url.hostname) and url.port != 0
    except ValueError:
        valid = False
    if not valid or url.query or url.fragment:
        raise ConfigError(f"lmcache_url: expected http://host:port, got {config.lmcache_url!r}")
    endpoint = config.tracing.otlp_endpoint
    if endpoint and not _is_web_address(endpoint):
        raise ConfigError(
            f"tracing.otlp_endpoint: expected http://host:port, or https, got {endpoint!r}"
        )
    if config.backend.retry_base_seconds > config.backend.retry_max_seconds:
        raise ConfigError(
            "backend.retry_base_seconds: must not be above backend.retry_max_seconds "
            f"({config.backend.retry_max_seconds:g})"
        )
    if config.backend_kind == "embedded" and not is_loopback(url.hostname or ""):
        raise ConfigError(
            "lmcache_url: the embedded engine listens there, so it must be a loopback "
            f"address, got {url.hostname!r}"
        )
    if not config.session_store_path:
        raise ConfigError("session_store_path: must not be empty")
    if config.auth_token and config.auth_token_file:
        raise ConfigError("auth_token and auth_token_file: set one of them, not both")
    for given, missing in (("certificate", "key"), ("key", "certificate")):
        if getattr(config.tls, f"{given}_file") and not getattr(config.tls, f"{missing}_file"):
            raise ConfigError(
                f"tls.{given}_file is set and tls.{missing}_file is not: set both, or none"
            )


def _is_web_address(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def _check_listen_addrs(config: Config) -> None:
    events, admin = config.listen_addr, config.admin.listen_addr
    has_token = bool(config.auth_token or config.auth_token_file)
    _check_listen_addr("listen_addr", events, has_token=has_token)
    if not admin:
        return
    _check_listen_addr("admin.listen_addr", admin, has_token=has_token)
    if admin == events and not admin.endswith(":0"):
        raise ConfigError(
            f"admin.listen_addr: {admin} is where events are listened for (listen_addr); "
            'choose another address, or "" for none'
        )


def _check_listen_addr(key: str, address: str, *, has_token: bool) -> None:
    if address.startswith("unix:"):
        if not address.removeprefix("unix:").startswith("/"):
            raise ConfigError(f"{key}: expected unix:/absolute/path, got {address!r}")
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"{key}: expected host:port, [ipv6]:port or unix:/path, got {address!r}")
    if not is_loopback(host) and not has_token:
        raise ConfigError(
            f"{key}: {address} can be reached from other machines, so auth_token or "
            "auth_token_file must be set; or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether a host, an IPv6 address in brackets or not, can only be this machine."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False  # a name can mean anything
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def read_token(config: Config) -> str:
    """Return the bearer token: the configuration's, or what its file holds now. Empty: none.

    Raises ConfigError, which never quotes the token.
    """
    if not config.auth_token_file:
        origin, token = "auth_token", config.auth_token
    else:
        path = resolve_path(config.auth_token_file)
        origin = f"auth_token_file: {path}"
        token = read_private(path, "auth_token_file").decode("utf-8", "replace").strip()
        if not token:
            raise ConfigError(f"{origin} is empty")
    if token and not _is_token(token):
        raise ConfigError(f"{origin}: expected visible ASCII characters only, without spaces")
    return token
