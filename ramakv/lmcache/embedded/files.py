"""Chunk files: their format, and the blocking calls that scan, write and read them.

A file is named by the sha256 of its chunk hash, in hex. It holds, little-endian,

    magic (8 bytes), length of the hash, length of the payload (4 each), blake2b of both (16),
    the hash in UTF-8, the payload.

It is written under a temporary name and renamed, and never synced: this is a cache, and what
a power cut leaves of a file is found out by its header.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b, sha256
from pathlib import Path
from typing import NamedTuple, Protocol

_MAGIC = b"ramakv\x00\x01"
_HEADER = struct.Struct("<8sII16s")
_SCAN_BYTES = 8192  # read of each file by a scan: all of it where chunks are small
_FILE_NAME = re.compile(r"[0-9a-f]{64}")
_TEMPORARY_NAME = re.compile(r"[0-9a-f]{64}\.tmp")


class FoundFile(NamedTuple):
    """A file that holds a whole chunk. Sorts by age, the oldest first."""

    modified_ns: int
    chunk_hash: str
    payload_bytes: int


class Scan(NamedTuple):
    """What a folder holds: chunks from the oldest to the newest, and names of other files."""

    found: list[FoundFile]
    skipped: list[str]


class Changed(NamedTuple):
    """Chunks that could not be written, and the first reason."""

    failed: list[str]
    reason: str


class Read(NamedTuple):
    """The payloads up to the first file that could not be read, and why it could not."""

    payloads: list[bytes]
    reason: str


class ChunkFiles(Protocol):
    """Where a disk tier keeps its payloads. Each call blocks, and is made in the tier's thread."""

    def scan(self, chunks_max: int) -> Scan:
        """Say what is there, of at most so many chunks; make ready to change it.

        Raises OSError when that cannot be.
        """
        ...

    def change(
        self, changes: Sequence[tuple[str, bool]], payload_of: Callable[[str], bytes]
    ) -> Changed:
        """Write (True) or remove (False) these chunks, in this order."""
        ...

    def read(self, chunk_hashes: Sequence[str]) -> Read:
        """Read payloads up to the first that is no good, and remove that one."""
        ...


class ChunkFolder:
    """A folder with a file for each chunk."""

    def __init__(self, path: Path) -> None:
        """Nothing is touched before the first call."""
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def scan(self, chunks_max: int) -> Scan:
        """Make the folder if need be and look at the head of every file in it.

        Of more than `chunks_max` chunks the oldest are removed, and so are temporary files that
        were left behind. Nothing else is touched. Raises OSError when the folder cannot be made
        or read.
        """
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found: list[FoundFile] = []
        skipped: list[str] = []
        with os.scandir(self._path) as entries:
            for entry in entries:
                if _TEMPORARY_NAME.fullmatch(entry.name):
                    _unlink(entry.path)
                    continue
                try:
                    found.append(_inspect(entry))
                except (OSError, ValueError):
                    skipped.append(entry.name)
        found.sort()
        for file in found[:-chunks_max]:
            _unlink(chunk_path(self._path, file.chunk_hash))
        return Scan(found[-chunks_max:], skipped)

    def change(
        self, changes: Sequence[tuple[str, bool]], payload_of: Callable[[str], bytes]
    ) -> Changed:
        """Write (True) or unlink (False) the files of these chunks, in this order."""
        failed: list[str] = []
        reason = ""
        for chunk_hash, written in changes:
            path = chunk_path(self._path, chunk_hash)
            if not written:
                _unlink(path)
                continue
            temporary = f"{path}.tmp"
            try:
                with open(temporary, "wb") as file:
                    file.write(_encode(chunk_hash, payload_of(chunk_hash)))
                os.replace(temporary, path)
            except OSError as exc:
                _unlink(temporary)
                failed.append(chunk_hash)
                reason = reason or str(exc)
        return Changed(failed, reason)

    def read(self, chunk_hashes: Sequence[str]) -> Read:
        """Read and check payloads up to the first file that is no good, and unlink that one."""
        payloads: list[bytes] = []
        for chunk_hash in chunk_hashes:
            path = chunk_path(self._path, chunk_hash)
            try:
                with open(path, "rb", buffering=0) as file:
                    payloads.append(_decode(file.readall(), chunk_hash))
            except (OSError, ValueError) as exc:
                _unlink(path)
                return Read(payloads, f"{path}: {exc}")
        return Read(payloads, "")


def read_chunk_file(path: Path) -> tuple[str, bytes]:
    """Return the hash and the payload that a file holds, whatever its name.

    Raises OSError when it cannot be read, ValueError when it holds no whole chunk.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_SCAN_BYTES)
        chunk_hash, _ = _parse_head(head, size)
        content = head if len(head) == size else head + file.readall()
    return chunk_hash, _decode(content, chunk_hash)


def chunk_path(disk_dir: Path, chunk_hash: str) -> str:
    """Return where the chunk's file is, or would be."""
    return os.path.join(disk_dir, _name(chunk_hash))


def _name(chunk_hash: str) -> str:
    return sha256(chunk_hash.encode("utf-8", "surrogatepass")).hexdigest()


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:  # gone already, or beyond our means: it is overwritten or skipped later
        return


def _inspect(entry: os.DirEntry[str]) -> FoundFile:
    """Read what the file says of itself.

    Raises OSError when it cannot be read, ValueError when it holds no whole chunk of its name.
    """
    if not _FILE_NAME.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
        raise ValueError("not a chunk file")
    with open(entry.path, "rb", buffering=0) as file:
        head = file.read(_SCAN_BYTES)
        status = os.fstat(file.fileno())
    chunk_hash, payload_bytes = _parse_head(head, status.st_size)
    if _name(chunk_hash) != entry.name:
        raise ValueError("the file of another chunk")
    if len(head) == status.st_size:
        _decode(head, chunk_hash)
    return FoundFile(status.st_mtime_ns, chunk_hash, payload_bytes)


def _encode(chunk_hash: str, payload: bytes) -> bytes:
    encoded = chunk_hash.encode("utf-8", "surrogatepass")
    digest = blake2b(encoded + payload, digest_size=16).digest()
    return _HEADER.pack(_MAGIC, len(encoded), len(payload), digest) + encoded + payload


def _parse_head(head: bytes, file_bytes: int) -> tuple[str, int]:
    """Return the chunk hash and the payload's length, of a file of this length."""
    if len(head) < _HEADER.size:
        raise ValueError("truncated")
    magic, hash_bytes, payload_bytes, _ = _HEADER.unpack_from(head)
    if magic != _MAGIC or file_bytes != _HEADER.size + hash_bytes + payload_bytes:
        raise ValueError("damaged or truncated")
    encoded = head[_HEADER.size : _HEADER.size + hash_bytes]
    return encoded.decode("utf-8", "surrogatepass"), payload_bytes


def _decode(content: bytes, chunk_hash: str) -> bytes:
    """Return the payload of this chunk's file.

    Raises ValueError when the content is not what was written for this chunk.
    """
    found, payload_bytes = _parse_head(content, len(content))
    digest = _HEADER.unpack_from(content)[3]
    body = memoryview(content)[_HEADER.size :]
    if found != chunk_hash or blake2b(body, digest_size=16).digest() != digest:
        raise ValueError("damaged")
    return content[len(content) - payload_bytes :]
