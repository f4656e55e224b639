"""Debug files: what each turn_end brought, for people who look into a session afterwards."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import structlog
import trio

from ramakv.actors.journal import RunSync
from ramakv.events import DebugContext, Timing, TurnEnd

log = structlog.get_logger("ramakv.debug")

_WRITERS_MAX = 4
_ticket = itertools.count()


class DebugFiles:
    """Writes `kvcache_debug_<session>_<turn>.json` into one folder, readable by its owner only."""

    def __init__(self, folder: Path, run_sync: RunSync = trio.to_thread.run_sync) -> None:
        self._folder = folder
        self._run_sync = run_sync
        self._limiter = trio.CapacityLimiter(_WRITERS_MAX)

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
        path = self._folder / file_name(event.session_id, turn_count)
        try:
            await self._run_sync(_write, path, content, limiter=self._limiter)
        except (OSError, ValueError, OverflowError, RecursionError) as error:
            # A number that JSON readers accept and its writer does not is no reason to fail.
            log.warning("debug file not written", path=str(path), cause=str(error))
            return False
        return True


def file_name(session_id: str, turn_count: int) -> str:
    """Name the file of a turn; characters that could mean something to a path become `_`."""
    return f"kvcache_debug_{re.sub('[^A-Za-z0-9_-]', '_', session_id)}_{turn_count}.json"


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_suffix(f".{next(_ticket)}.partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(content))
    partial.replace(path)
