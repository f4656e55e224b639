"""Debug files: what each turn_end brought, for people who look into a session afterwards."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import structlog
import trio

from ramakv.actors.journal import RunSync
from ramakv.config import Limits
from ramakv.events import DebugContext, Timing, TurnEnd

log = structlog.get_logger("ramakv.debug")

PREFIX = "kvcache_debug_"
NAME_CHARS_MAX = 255
"""What usual file systems allow; each is asked for its own."""
REMOVALS_MAX = 256
"""Most old files that one write removes: a folder that is far too full is emptied step by step."""

_DIGEST_CHARS = 16
_FOR_ONE_WRITER = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DebugFiles:
    """Writes `kvcache_debug_<session>_<turn>.json` into one folder, readable by its owner only."""

    def __init__(
        self, folder: Path, limits: Limits, run_sync: RunSync = trio.to_thread.run_sync
    ) -> None:
        self._folder = _Folder(folder, limits.debug_files_max, limits.debug_bytes_max)
        self._run_sync = run_sync
        self._limiter = trio.CapacityLimiter(1)  # a folder is counted by one at a time

    async def write(self, event: TurnEnd, turn_count: int) -> bool:
        """Write one turn's file; a failure is logged and returned as False."""
        context = event.debug_context or DebugContext()
        content = {
            "session_id": event.session_id,
            "turn_count": turn_count,
            "chunk_hashes": event.kv_transfer_params.chunk_hashes,
            "messages": context.messages or [],
            "timing": context.timing or Timing(),
        }
        try:
            await self._run_sync(
                self._folder.write, event.session_id, turn_count, content, limiter=self._limiter
            )
        except (OSError, ValueError, OverflowError, RecursionError) as error:
            # A number that JSON readers accept and its writer does not is no reason to fail.
            log.warning(
                "debug file not written",
                session_id=event.session_id,
                folder=str(self._folder.path),
                cause=str(error),
            )
            return False
        return True


def file_name(session_id: str, turn_count: int, chars_max: int = NAME_CHARS_MAX) -> str:
    """Name the file of a turn; characters that could mean something to a path become `_`.

    A name of more than `chars_max` is cut, and a digest of the session id tells it from others.
    """
    name = f"{PREFIX}{re.sub('[^A-Za-z0-9_-]', '_', session_id)}_{turn_count}.json"
    if len(name) <= chars_max:
        return name
    digest = sha256(session_id.encode()).hexdigest()[:_DIGEST_CHARS]
    end = f"-{digest}_{turn_count}.json"
    return name[: chars_max - len(end)] + end


class _Folder:
    """A folder and what is in it, oldest first: listed once, counted from then on.

    Everything is done relative to the open folder, and no link is followed in it: whatever
    somebody plants there, no file is written, nor removed, anywhere else.
    """

    def __init__(self, path: Path, files_max: int, bytes_max: int) -> None:
        self.path = path
        self._files_max = files_max
        self._bytes_max = bytes_max
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        self._listed: tuple[int, int] | None = None  # device and inode of the folder listed

    def write(self, session_id: str, turn_count: int, content: dict[str, Any]) -> None:
        """Write a file, after removing old ones that it takes the place of."""
        encoded = msgspec.json.encode(content)
        if len(encoded) > self._bytes_max:
            raise ValueError(
                f"{len(encoded)} bytes are over limits.debug_bytes_max ({self._bytes_max})"
            )
        with self._opened() as folder:
            name = file_name(session_id, turn_count, os.fpathconf(folder, "PC_NAME_MAX"))
            self._make_room(folder, name, len(encoded))
            _write(folder, name, encoded)
        self._sizes[name] = len(encoded)
        self._bytes += len(encoded)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            status = os.fstat(folder)
            if self._listed != (status.st_dev, status.st_ino):
                self._list(folder, status)
            yield folder
        finally:
            os.close(folder)

    def _list(self, folder: int, status: os.stat_result) -> None:
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            log.warning(
                "the folder of the debug files is open to others",
                mode=f"{mode:04o}",
                advice=f"chmod 700 {self.path}",
            )
        found = []
        with os.scandir(folder) as entries:
            for entry in entries:
                ours = entry.name.startswith(PREFIX) and entry.name.endswith((".json", ".partial"))
                if ours and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        seen = entry.stat(follow_symlinks=False)
                        found.append((seen.st_mtime_ns, entry.name, seen.st_size))
        self._sizes = {name: size for _, name, size in sorted(found)}
        self._bytes = sum(self._sizes.values())
        self._listed = status.st_dev, status.st_ino

    def _make_room(self, folder: int, name: str, size: int) -> None:
        self._bytes -= self._sizes.pop(name, 0)  # that one is replaced
        for _ in range(REMOVALS_MAX):
            fits = len(self._sizes) < self._files_max and self._bytes + size <= self._bytes_max
            if fits or not self._sizes:
                return
            oldest = next(iter(self._sizes))
            with suppress(FileNotFoundError):
                os.unlink(oldest, dir_fd=folder)
            self._bytes -= self._sizes.pop(oldest)


def _write(folder: int, name: str, content: bytes) -> None:
    partial = f"{PREFIX}{secrets.token_hex(8)}.partial"
    try:
        with open(os.open(partial, _FOR_ONE_WRITER, 0o600, dir_fd=folder), "wb") as file:
            file.write(content)
        # Takes the place of a link with that name, too, and leaves alone what it leads to.
        os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial, dir_fd=folder)
        raise
