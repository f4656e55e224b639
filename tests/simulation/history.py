"""A history: what agents, LMCache, the disk and the machine do. Plain data that JSON can hold."""

from __future__ import annotations

import shlex
from typing import Any, Literal

import msgspec

Point = Literal[
    "load.before",
    "load.after",
    "commit.before",
    "commit.after",
    "send.before",
    "send.after",
    "answer.before",
    "answer.after",
    "reply.before",
    "reply.after",
]
"""Where a fault can strike: around each read and commit of the database, each call to LMCache
(`send`), what it answers (`answer`), and each reply to an agent."""

FilePoint = Literal["file.open", "file.read", "file.write", "file.sync", "file.truncate"]
"""Where one can strike inside SQLite: whatever it does to its files."""

FailurePoint = Literal["load.before", "commit.before", "send.before", "answer.before"]
"""Where one operation can fail, and the daemon lives on."""

EngineMode = Literal[
    "well",
    "slow",
    "hangs",
    "refuses connections",
    "resets mid-body",
    "fails on some ranks",
    "applies, then times out",
    "applies late",
    "answers no JSON",
    "counts less",
    "rejects everything",
    "anything",
]

DiskMode = Literal["well", "slow", "full", "locked", "failing", "read-only", "flaky"]


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. Sessions, chunks and forks are numbers."""

    type: str
    session: int
    chunks: tuple[int, ...] = ()
    seq: int | None = None
    other: int | None = None
    """The child of a fork, or the source of a restore."""
    fork: int | None = None

    def body(self) -> dict[str, Any]:
        """Return what an agent sends."""
        body: dict[str, Any] = {"type": self.type, "session_id": f"s{self.session}"}
        if self.type == "turn_end":
            body["kv_transfer_params"] = {"chunk_hashes": [f"c{chunk}" for chunk in self.chunks]}
            body["seq"] = self.seq
        elif self.type == "session_fork" and self.other is not None:
            body["child_session_id"] = f"s{self.other}"
        elif self.type == "snapshot_restore" and self.other is not None:
            body["source_session_id"] = f"s{self.other}"
        elif self.type == "session_fork_end" and self.fork is not None:
            body["fork_id"] = self.fork
        return body


class Send(msgspec.Struct, frozen=True, omit_defaults=True, tag="send"):
    """An agent posts an event, or several in one array, while the history goes on."""

    events: tuple[Event, ...]
    patience_seconds: float | None = None
    """When it hangs up."""
    waits: bool = False
    """Whether the history goes on only after the reply."""


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Nothing happens for a while."""

    seconds: float


class Engine(msgspec.Struct, frozen=True, omit_defaults=True, tag="engine"):
    """LMCache behaves otherwise from here on; some hashes are bad to it."""

    mode: EngineMode
    bad: tuple[int, ...] = ()


class EngineRestart(msgspec.Struct, frozen=True, tag="engine_restart"):
    """LMCache is started anew, and has forgotten everything."""


class Disk(msgspec.Struct, frozen=True, tag="disk"):
    """The database behaves otherwise from here on."""

    mode: DiskMode


class Restart(msgspec.Struct, frozen=True, tag="restart"):
    """The daemon drains and starts anew."""


class Kill(msgspec.Struct, frozen=True, omit_defaults=True, tag="kill"):
    """The daemon dies, at once or when it comes to a point for the n-th time; it starts anew."""

    at: Point | FilePoint | None = None
    nth: int = 1
    power_fails: bool = False
    """The machine with it: what was not synced is lost."""


class Fail(msgspec.Struct, frozen=True, omit_defaults=True, tag="fail"):
    """One single operation fails: the n-th that comes to this point."""

    at: FailurePoint
    nth: int = 1
    disk: DiskMode = "failing"


class FailFile(msgspec.Struct, frozen=True, omit_defaults=True, tag="fail_file"):
    """Operations on the database's files fail: the n-th that comes to this point, and the next."""

    at: FilePoint
    nth: int = 1
    how: Literal["fails", "full", "short"] = "fails"
    """`short`: half of it is written before it fails."""
    times: int = 1


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """Everything under way comes to its end; what is in memory must equal what is on disk."""


Step = Send | Pause | Engine | EngineRestart | Disk | Restart | Kill | Fail | FailFile | Settle


class History(msgspec.Struct, frozen=True):
    """Settings of the daemon, what happens, and the seed of everything that is left to chance."""

    seed: int
    settings: dict[str, Any]
    """Configuration keys, dotted as `section__key`."""
    steps: tuple[Step, ...]

    @property
    def touches_files(self) -> bool:
        """Whether something happens inside SQLite."""
        return any(
            isinstance(step, FailFile)
            or (isinstance(step, Kill) and (step.power_fails or str(step.at).startswith("file.")))
            for step in self.steps
        )

    def replay_line(self) -> str:
        """Return the command that plays this history again."""
        text = msgspec.json.encode(self).decode()
        return f"python -m tests.simulation replay {shlex.quote(text)}"

    @classmethod
    def from_text(cls, text: str) -> History:
        """Read a history from a replay line's argument."""
        return msgspec.json.decode(text, type=cls)
