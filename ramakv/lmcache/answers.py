"""What LMCache answers, endpoint by endpoint: typed, frozen, and open to fields yet unknown.

A field that only some versions send has a default: None, or empty. Words that LMCache chooses
from a list, such as `status` and `role`, stay plain text, so that a new one breaks nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What most answers share."""

    status: str = ""
    message: str = ""


class InferenceVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Version of the inference engine."""

    vllm_version: str


class ConfUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of each setting that was to be changed."""

    updated: dict[str, Any] = {}
    """The settings that were changed, with their values as LMCache understood them."""
    errors: dict[str, str] = {}
    """The settings that were not, and why."""


class EngineMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of one process. None: not asked for, or unknown to this LMCache."""

    attributes: dict[str, Any]
    """Everything that was answered, by name."""
    role: str | None = None
    """`worker` or `scheduler`."""
    model_name: str | None = None
    worker_id: int | None = None
    world_size: int | None = None
    """Workers in all."""
    chunk_size: int | None = None
    """Tokens in a chunk."""
    kv_dtype: str | None = None
    kv_shape: list[int] | None = None
    """Layers, 2 (keys and values) or 1, tokens in a chunk, heads, head size."""
    use_mla: bool | None = None
    """Whether the model has one latent KV for all ranks: ranks other than 0 then hold nothing."""


class CacheCleared(Answer, frozen=True, kw_only=True):
    """Answer to a clear."""

    num_removed: int
    """What was removed; LMCache 0.4.4 counts tokens, not chunks."""


class TokensStored(Answer, frozen=True, kw_only=True):
    """Answer to a store of mock tokens."""

    num_tokens: int
    """Tokens submitted; LMCache does not say whether they were kept."""


class TokensRetrieved(Answer, frozen=True, kw_only=True):
    """Answer to a retrieve of mock tokens."""

    num_tokens: int
    """Tokens asked for."""
    num_retrieved: int
    """Tokens found."""


class KVCacheCheck(Answer, frozen=True, kw_only=True):
    """MD5 checksums of slots in the inference engine's own KV cache."""

    slot_mapping_ranges: list[tuple[int, int] | int]
    """The slots, as LMCache writes them: pairs of first and last, and single numbers."""
    chunk_size: int | None = None
    """Slots in one checksum; None where none was asked for."""
    num_chunks: int = 0
    chunk_checksums: list[str] | dict[str, list[str]] = []
    """One per chunk, in hex; by name of the layer if layerwise."""
    layerwise: bool = False

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The slots as pairs of first and last, both included."""
        return [(r, r) if isinstance(r, int) else r for r in self.slot_mapping_ranges]


class SlotRecording(Answer, frozen=True, kw_only=True):
    """Whether LMCache logs the slots of each store and retrieve."""

    kvcache_check_log_enabled: bool


class KVLayer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of the inference engine's own KV cache."""

    shape: list[int]
    dtype: str
    device: str


class KVCacheInfo(Answer, frozen=True, kw_only=True):
    """Structure of the inference engine's own KV cache."""

    num_layers: int
    layers: dict[str, KVLayer]


class FSChunksLoaded(Answer, frozen=True, kw_only=True):
    """What a load of chunk files into the hot cache came to."""

    loaded_chunks: int
    """Chunks that are in the hot cache now, those that were there before included."""
    total_files: int
    """Files found."""
    failed_keys: list[str] = []
    """Some of the keys that could not be loaded, as many as were asked for at most."""
    config_path: str = ""


class FreezeState(Answer, frozen=True, kw_only=True):
    """Whether the engine is frozen: stores nothing, and retrieves from the hot tier only."""

    freeze: bool


class HotCacheState(Answer, frozen=True, kw_only=True):
    """Whether the hot tier is in use."""

    hot_cache: bool


class LookupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The lookup client and server of one process, each by its class, wrapped ones in brackets."""

    client: str
    """The text `None` where there is none."""
    server: str
    """The text `None` where there is none."""
    role: str | None = None
    """`scheduler` or `worker`; LMCache 0.4.4 does not say."""


class LookupChange(msgspec.Struct, frozen=True, kw_only=True):
    """What a close, create or recreate of the lookup client or server did."""

    old: str | None = None
    """Class of the one that was closed."""
    new: str | None = None
    """Class of the one that was made, or would be."""
    dryrun: bool = False
    role: str | None = None


class ChunkStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the chunks that were looked up. None or empty: this LMCache does not say."""

    is_collecting: bool
    """LMCache 0.4.4 calls it `enabled`."""
    total_chunks: int
    unique_chunks: int
    duplicate_chunks: int | None = None
    reuse_rate: float | None = None
    """Share of the chunks that were seen before, 0 to 1."""
    total_requests: int | None = None
    timestamp: float | None = None
    """Seconds since 1970."""
    auto_exit_enabled: bool | None = None
    auto_exit_timeout_hours: float | None = None
    auto_exit_target_unique_chunks: int | None = None
    timing: dict[str, Any] = {}
    bloom_filter: dict[str, Any] = {}
    file_hash: dict[str, Any] = {}
    async_queue: dict[str, Any] = {}


class BypassList(Answer, frozen=True, kw_only=True):
    """The storage backends, and which of them are bypassed."""

    bypassed_backends: list[str]
    all_backends: list[str]


class BypassAdded(Answer, frozen=True, kw_only=True):
    """Answer to a backend being bypassed."""

    backend_name: str
    bypassed: bool
    was_already_bypassed: bool = False
    bypassed_backends: list[str] = []


class BypassRemoved(Answer, frozen=True, kw_only=True):
    """Answer to a backend being no longer bypassed."""

    backend_name: str
    bypassed: bool
    was_bypassed: bool = False
    bypassed_backends: list[str] = []


class PrefetchStarted(Answer, frozen=True, kw_only=True):
    """Answer to a prefetch, given before any chunk is loaded."""

    lookup_id: str | int
    num_chunks: int
    """Chunks submitted, not loaded."""


class Evicted(Answer, frozen=True, kw_only=True):
    """Answer to an evict."""

    num_evicted: int
    """Removals, summed over the tiers. A scheduler passes on the count of one worker only."""
