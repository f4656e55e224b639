"""The configuration: one TOML file, overridden by the environment, checked before anything starts.

The structs below are the one list of keys, defaults, types and bounds; `config.toml`
repeats them for people, and a test holds it to them. Units are in the names.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from ramakv.errors import ConfigError
from ramakv.private_files import read_private

DEFAULT_CONFIG_PATH = "/etc/ram-a-kv/config.toml"
CONFIG_PATH_VARIABLE = "RAM_A_KV_CONFIG"
ENVIRONMENT_PREFIX = "RAMAKV_"

HOT_LOCATION = "LocalCPUBackend"
"""Name of LMCache's hot tier, the only one that a suspend touches."""
DISK_LOCATION = "LocalDiskBackend"
"""Name of LMCache's disk tier."""

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
SecondsOrOff = Annotated[float, Meta(ge=0, le=1e9)]
"""A duration that 0 switches off."""
Share = Annotated[float, Meta(ge=0, le=1)]
Locations = Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)]

_is_token = re.compile(r"[!-~]+").fullmatch  # what an Authorization header can carry


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


class Limits(_Section, frozen=True):
    """Bounds on what clients send and on what waits inside."""

    body_bytes_max: Count = 8 * 1024 * 1024
    body_timeout_seconds: Seconds = 10.0
    in_hand_bytes_max: Count = 128 * 1024 * 1024
    batch_events_max: Count = 1024
    chunks_per_session_max: Count = 32_768
    hash_chars_max: Count = 256
    session_id_chars_max: Count = 256
    sessions_max: Count = 200_000
    awake_sessions_max: Count = 1500
    forks_per_session_max: Count = 1000
    mailbox_events_max: Count = 64
    event_timeout_seconds: Seconds = 10.0
    connections_max: Count = 8192
    keep_alive_seconds: Seconds = 15.0
    send_timeout_seconds: Seconds = 10.0
    drain_timeout_seconds: Seconds = 10.0
    debug_files_max: Count = 10_000
    debug_bytes_max: Count = 1024**3


class Backend(_Section, frozen=True):
    """How LMCache is called."""

    kind: Literal["lmcache", "embedded", "noop"] = "lmcache"
    calls_per_second: Seconds = 200.0
    burst_calls_max: Count = 50
    calls_in_flight_max: Count = 8
    chunks_per_call_max: Count = 4096
    prefetches_waiting_max: Count = 1024
    prefetch_ack_seconds: Seconds = 0.1
    prefetch_deadline_seconds: Seconds = 2.0
    connect_timeout_seconds: Seconds = 2.0
    call_timeout_seconds: Seconds = 12.0
    unconsumed_chunks_max: Annotated[int, Meta(ge=0)] = 8192
    evict_tries_max: Count = 5
    retry_base_seconds: Seconds = 0.5
    retry_max_seconds: Seconds = 30.0
    breaker_failures_max: Count = 5
    breaker_open_seconds: Seconds = 5.0


class Eviction(_Section, frozen=True):
    """When released chunks are evicted, and from where."""

    batch_chunks_max: Count = 512
    batch_age_seconds: Seconds = 0.5
    dead_letters_max: Count = 10_000
    locations: Locations = (HOT_LOCATION,)
    close_locations: Locations = (HOT_LOCATION,)


class Sessions(_Section, frozen=True):
    """How sessions end that nobody ends."""

    idle_suspend_seconds: SecondsOrOff = 3600.0
    idle_close_seconds: SecondsOrOff = 604_800.0
    fork_ttl_seconds: SecondsOrOff = 86_400.0
    passivate_seconds: Seconds = 60.0
    closed_memory_seconds: Seconds = 60.0
    keep_pinned_on_close: bool = False


class Store(_Section, frozen=True):
    """SQLite."""

    synchronous: Literal["FULL", "NORMAL"] = "FULL"
    group_commits_max: Count = 128
    mailbox_commits_max: Count = 2048
    busy_timeout_seconds: Seconds = 1.0
    wal_autocheckpoint_pages: Count = 4000


class Tls(_Section, frozen=True):
    """HTTPS instead of HTTP on the event listener, where both files are named."""

    certificate_file: str = ""
    key_file: str = ""
    handshake_timeout_seconds: Seconds = 5.0


class Log(_Section, frozen=True):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class Embedded(_Section, frozen=True):
    """The embedded engine: its tiers, its KV cache, which LMCache it is like, and its faults."""

    hot_chunks_max: Count = 16_384
    disk_chunks_max: Count = 131_072
    disk_dir: str = "{state}/chunks"
    chunk_bytes: Count = 256
    disk_read_seconds: SecondsOrOff = 0.0
    remote_dir: str = ""
    remote_chunks_max: Count = 524_288
    chunk_size: Count = 256
    kv_layers: Annotated[int, Meta(ge=1, le=1024)] = 2
    kv_slots: Annotated[int, Meta(ge=1, le=1_048_576)] = 4096
    kv_slot_bytes: Annotated[int, Meta(ge=1, le=65_536)] = 4
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    behaviour: Literal["documented", "lmcache-0.4.4"] = "documented"
    fault_seed: int = 0
    fault_latency_seconds_max: SecondsOrOff = 0.0
    fault_error_share: Share = 0.0
    fault_hang_share: Share = 0.0
    fault_worker_share: Share = 0.0


class Config(_Section, frozen=True):
    """Everything. Keys at the top level are the Rust daemon's."""

    listen_addr: str = "127.0.0.1:6998"
    lmcache_url: str = "http://localhost:6999"
    noop_backend: bool = False
    debug_enabled: bool = False
    debug_dir: str = "kvcache_debug"
    trace_events: bool = False
    session_store_path: str = "/var/lib/ram-a-kv/sessions.db"
    turn_start_prefetch: bool = True
    auth_token: str = ""
    auth_token_file: str = ""
    limits: Limits = msgspec.field(default_factory=Limits)
    backend: Backend = msgspec.field(default_factory=Backend)
    eviction: Eviction = msgspec.field(default_factory=Eviction)
    sessions: Sessions = msgspec.field(default_factory=Sessions)
    store: Store = msgspec.field(default_factory=Store)
    tls: Tls = msgspec.field(default_factory=Tls)
    log: Log = msgspec.field(default_factory=Log)
    embedded: Embedded = msgspec.field(default_factory=Embedded)

    @property
    def backend_kind(self) -> Literal["lmcache", "embedded", "noop"]:
        """Which backend is used: `noop_backend`, the older key, wins over `backend.kind`."""
        return "noop" if self.noop_backend else self.backend.kind

    @property
    def is_https(self) -> bool:
        """Whether events come over TLS; a unix socket needs none."""
        return bool(self.tls.certificate_file) and not self.listen_addr.startswith("unix:")

    @property
    def store_path(self) -> Path:
        """Where the database is."""
        return resolve_path(self.session_store_path)


def resolve_path(text: str) -> Path:
    """Fill in `{state}`, the user's state folder for ramakv, and `~`."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(text.replace("{state}", f"{base}/ram-a-kv")).expanduser()


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
    return isinstance(kind, type) and issubclass(kind, _Section)


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
    _check_listen_addr(config)
    url = urlsplit(config.lmcache_url)
    try:
        valid = url.scheme == "http" and bool(url.hostname) and url.port != 0
    except ValueError:
        valid = False
    if not valid or url.query or url.fragment:
        raise ConfigError(f"lmcache_url: expected http://host:port, got {config.lmcache_url!r}")
    if config.backend.retry_base_seconds > config.backend.retry_max_seconds:
        raise ConfigError(
            "backend.retry_base_seconds: must not be above backend.retry_max_seconds "
            f"({config.backend.retry_max_seconds:g})"
        )
    if config.backend_kind == "embedded" and not _is_loopback(url.hostname or ""):
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


def _check_listen_addr(config: Config) -> None:
    address = config.listen_addr
    if address.startswith("unix:"):
        if not address.removeprefix("unix:").startswith("/"):
            raise ConfigError(f"listen_addr: expected unix:/absolute/path, got {address!r}")
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(
            f"listen_addr: expected host:port, [ipv6]:port or unix:/path, got {address!r}"
        )
    if not _is_loopback(host) and not (config.auth_token or config.auth_token_file):
        raise ConfigError(
            f"listen_addr: {address} can be reached from other machines, so auth_token or "
            "auth_token_file must be set; or listen on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
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
