"""The configuration: the one list of keys, defaults, types and bounds.

`config.toml` repeats them for people, and a test holds it to them. Units are in the names.
How a file and the environment become a Config is in `config_file`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

HOT_LOCATION = "LocalCPUBackend"
"""Name of LMCache's hot tier."""
DISK_LOCATION = "LocalDiskBackend"
"""Name of LMCache's disk tier."""
SUSPEND_LOCATIONS = (HOT_LOCATION,)
"""Where a suspend evicts from: a restore brings the chunks back from the slower tiers."""

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
SecondsOrOff = Annotated[float, Meta(ge=0, le=1e9)]
"""A duration that 0 switches off."""
Share = Annotated[float, Meta(ge=0, le=1)]
Locations = Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


class Limits(Section, frozen=True):
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


class Backend(Section, frozen=True):
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


class Eviction(Section, frozen=True):
    """When released chunks are evicted, and from where."""

    batch_chunks_max: Count = 512
    batch_age_seconds: Seconds = 0.5
    dead_letters_max: Count = 10_000
    locations: Locations = (HOT_LOCATION,)
    close_locations: Locations = (HOT_LOCATION,)


class Sessions(Section, frozen=True):
    """How sessions end that nobody ends."""

    idle_suspend_seconds: SecondsOrOff = 3600.0
    idle_close_seconds: SecondsOrOff = 604_800.0
    fork_ttl_seconds: SecondsOrOff = 86_400.0
    passivate_seconds: Seconds = 60.0
    closed_memory_seconds: Seconds = 60.0
    keep_pinned_on_close: bool = False


class Residency(Section, frozen=True):
    """Which sessions' chunks stay in the hot tier while their agents are away."""

    policy: Literal["off", "sticky", "auto"] = "auto"
    hot_chunks_max: Annotated[int, Meta(ge=0)] | Literal["auto"] = 0
    bring_ups_per_turn: Annotated[float, Meta(ge=0, le=100)] = 0.6


class Store(Section, frozen=True):
    """SQLite."""

    synchronous: Literal["FULL", "NORMAL"] = "FULL"
    group_commits_max: Count = 128
    mailbox_commits_max: Count = 2048
    busy_timeout_seconds: Seconds = 1.0
    wal_autocheckpoint_pages: Count = 4000


class Admin(Section, frozen=True):
    """The listener for operators: probes and the live page. It takes the events' token."""

    listen_addr: str = "127.0.0.1:6997"


class Tls(Section, frozen=True):
    """HTTPS instead of HTTP on both listeners, where both files are named."""

    certificate_file: str = ""
    key_file: str = ""
    handshake_timeout_seconds: Seconds = 5.0


class Log(Section, frozen=True):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class Tracing(Section, frozen=True):
    """OpenTelemetry traces; they need the extra: `pip install ramakv[otel]`."""

    enabled: bool = False
    otlp_endpoint: str = ""


class Embedded(Section, frozen=True):
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


class Config(Section, frozen=True):
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
    residency: Residency = msgspec.field(default_factory=Residency)
    store: Store = msgspec.field(default_factory=Store)
    admin: Admin = msgspec.field(default_factory=Admin)
    tls: Tls = msgspec.field(default_factory=Tls)
    log: Log = msgspec.field(default_factory=Log)
    tracing: Tracing = msgspec.field(default_factory=Tracing)
    embedded: Embedded = msgspec.field(default_factory=Embedded)

    @property
    def backend_kind(self) -> Literal["lmcache", "embedded", "noop"]:
        """Which backend is used: `noop_backend`, the older key, wins over `backend.kind`."""
        return "noop" if self.noop_backend else self.backend.kind

    @property
    def is_https(self) -> bool:
        """Whether events come over TLS; a unix socket needs none."""
        return self._uses_tls(self.listen_addr)

    @property
    def admin_is_https(self) -> bool:
        """Whether operators come over TLS, likewise."""
        return self._uses_tls(self.admin.listen_addr)

    def _uses_tls(self, address: str) -> bool:
        return bool(self.tls.certificate_file) and not address.startswith("unix:")

    @property
    def store_path(self) -> Path:
        """Where the database is."""
        return resolve_path(self.session_store_path)


def resolve_path(text: str) -> Path:
    """Fill in `{state}`, the user's state folder for ramakv, and `~`."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(text.replace("{state}", f"{base}/ram-a-kv")).expanduser()
