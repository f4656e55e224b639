"""A small KV cache of real bytes: layers of slots, one slot a token. Pure, no I/O.

It stands where the GPU's is. `compute` does what the model would: it fills the slots of a chunk
with bytes that depend on the chunk's hash, the layer and the worker, and on nothing else. What
`read` returns is what is stored; `write` puts it back, and the checksums tell whether it is
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import md5, shake_128

import msgspec

from ramakv.lmcache.embedded.hashing import TokenChunk


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer's tensor looks like."""

    shape: tuple[int, ...]
    dtype: str = "torch.uint8"
    device: str = "cpu"


class KvCache:
    """Layers of slots. The token at position p of a sequence lies in slot p modulo `slots`.

    There must be as many slots as a chunk has tokens.
    """

    def __init__(
        self, *, layers: int, slots: int, slot_bytes: int, worker_id: int, layer_name: str
    ) -> None:
        """Start with bytes that differ from slot to slot. `layer_name` has a {} for the number."""
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._seed = f"worker {worker_id}"
        self._layers = {
            layer_name.format(layer): bytearray(self._bytes_for("empty", layer, slots))
            for layer in range(layers)
        }

    def compute(self, chunk: TokenChunk) -> None:
        """Fill the chunk's slots as the model would."""
        for layer, content in enumerate(self._layers.values()):
            self._fill(content, chunk.first, self._bytes_for(chunk.chunk_hash, layer, chunk.tokens))

    def read(self, chunk: TokenChunk) -> bytes:
        """Return the bytes of the chunk's slots, layer after layer."""
        begin = chunk.first % self.slots * self.slot_bytes
        end = begin + chunk.tokens * self.slot_bytes
        return b"".join(
            bytes(content[begin:end] + content[: max(0, end - len(content))])
            for content in self._layers.values()
        )

    def write(self, chunk: TokenChunk, payload: bytes) -> bool:
        """Put the bytes back. Return False, and change nothing, when they are not of this size."""
        layer_bytes = chunk.tokens * self.slot_bytes
        if len(payload) != layer_bytes * len(self._layers):
            return False
        for layer, content in enumerate(self._layers.values()):
            part = payload[layer * layer_bytes : (layer + 1) * layer_bytes]
            self._fill(content, chunk.first, part)
        return True

    def checksums(self, slots: Sequence[int], chunk_size: int) -> list[str]:
        """Return the MD5 of each run of `chunk_size` slots, over all layers."""
        return [
            _md5(b"".join(self._gather(content, run) for content in self._layers.values()))
            for run in _runs(slots, chunk_size)
        ]

    def layer_checksums(self, slots: Sequence[int], chunk_size: int) -> dict[str, list[str]]:
        """Return the MD5 of each run of `chunk_size` slots, layer by layer."""
        return {
            name: [_md5(self._gather(content, run)) for run in _runs(slots, chunk_size)]
            for name, content in self._layers.items()
        }

    def info(self) -> dict[str, LayerInfo]:
        """Return each layer's shape."""
        return {name: LayerInfo(shape=(self.slots, self.slot_bytes)) for name in self._layers}

    def _bytes_for(self, what: str, layer: int, slots: int) -> bytes:
        source = f"{self._seed}, layer {layer}, {what}"
        return shake_128(source.encode()).digest(slots * self.slot_bytes)

    def _fill(self, content: bytearray, first: int, part: bytes) -> None:
        begin = first % self.slots * self.slot_bytes
        head = part[: len(content) - begin]
        content[begin : begin + len(head)] = head
        content[: len(part) - len(head)] = part[len(head) :]

    def _gather(self, content: bytearray, slots: Sequence[int]) -> bytes:
        size = self.slot_bytes
        return b"".join(bytes(content[slot * size : (slot + 1) * size]) for slot in slots)


def _runs(slots: Sequence[int], chunk_size: int) -> list[Sequence[int]]:
    return [slots[start : start + chunk_size] for start in range(0, len(slots), chunk_size)]


def _md5(content: bytes) -> str:
    return md5(content, usedforsecurity=False).hexdigest()
