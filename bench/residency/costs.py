"""What a request waits for its first token: the cost models. Pure.

Stated, not measured: a model has one figure for each of the three ways in which the KV of a
prompt comes to the accelerator, and a request pays for each block by the way it came. Queues
are left out, in the engine as on the disk: what is compared is work, not load.
"""

from __future__ import annotations

from dataclasses import dataclass

from ramakv.commands.trace import DECODE_TOKENS_PER_SECOND


@dataclass(frozen=True, slots=True)
class CostModel:
    """A served model and its machine."""

    name: str
    machine: str
    kv_bytes_per_token: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    """Of one request among others: how long a turn lasts whose duration was not recorded."""
    disk_bytes_per_second: float
    host_bytes_per_second: float
    """From host memory to the accelerators, over all links that are used at once."""

    def disk_seconds(self, tokens: int) -> float:
        """How long the KV of so many tokens takes from disk to host memory."""
        return tokens * self.kv_bytes_per_token / self.disk_bytes_per_second

    def first_token_seconds(self, hot_tokens: int, disk_tokens: int, new_tokens: int) -> float:
        """How long a prompt takes of which so many tokens were hot, on disk, or are computed."""
        moved = (hot_tokens + disk_tokens) * self.kv_bytes_per_token / self.host_bytes_per_second
        computed = new_tokens / self.prefill_tokens_per_second
        return moved + self.disk_seconds(disk_tokens) + computed


def kv_bytes_per_token(*, layers: int, kv_heads: int, head_size: int, value_bytes: int = 2) -> int:
    """Return the bytes of a token's keys and values."""
    return 2 * layers * kv_heads * head_size * value_bytes


# Where each figure comes from is in bench/README.md.
_DRIVE = 6.5e9
_LINK = 55e9

MODELS = {
    model.name: model
    for model in (
        CostModel(
            name="8b",
            machine="Llama 3.1 8B, FP8, on one H100 with one drive",
            kv_bytes_per_token=kv_bytes_per_token(layers=32, kv_heads=8, head_size=128),
            prefill_tokens_per_second=20_000,
            decode_tokens_per_second=DECODE_TOKENS_PER_SECOND,
            disk_bytes_per_second=_DRIVE,
            host_bytes_per_second=_LINK,
        ),
        CostModel(
            name="70b",
            machine="Llama 3.1 70B, FP8, on four H100 with a drive each",
            kv_bytes_per_token=kv_bytes_per_token(layers=80, kv_heads=8, head_size=128),
            prefill_tokens_per_second=10_000,
            decode_tokens_per_second=DECODE_TOKENS_PER_SECOND,
            disk_bytes_per_second=4 * _DRIVE,
            host_bytes_per_second=4 * _LINK,
        ),
    )
}
