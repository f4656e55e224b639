"""Which events of a batch may run side by side: those that touch different sessions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ramakv import events

Placed = tuple[int, events.AnyEvent]
"""An event and its place in the batch."""


def stages(batch: Iterable[Placed]) -> Iterator[list[list[Placed]]]:
    """Split a batch into stages that run one after the other, of groups that run side by side.

    A group keeps the order of its events; all events of a session, and of those that it
    forks into or restores from, are in one group. An event about no session, such as
    `health`, is a stage of its own: it sees what came before it and not what comes after.
    """
    stage: list[Placed] = []
    for placed in batch:
        if isinstance(placed[1], events.SessionEvent):
            stage.append(placed)
            continue
        if stage:
            yield _groups(stage)
            stage = []
        yield [[placed]]
    if stage:
        yield _groups(stage)


def _groups(stage: list[Placed]) -> list[list[Placed]]:
    leader: dict[str, str] = {}

    def find(session_id: str) -> str:
        while (above := leader.setdefault(session_id, session_id)) != session_id:
            session_id = above
        return session_id

    for _, event in stage:
        first, *others = _sessions_of(event)
        for other in others:
            leader[find(other)] = find(first)
    groups: dict[str, list[Placed]] = {}
    for placed in stage:
        groups.setdefault(find(next(_sessions_of(placed[1]))), []).append(placed)
    return list(groups.values())


def _sessions_of(event: events.AnyEvent) -> Iterator[str]:
    assert isinstance(event, events.SessionEvent)
    yield event.session_id
    match event:
        case events.SnapshotRestore(source_session_id=str(source)):
            yield source
        case events.SessionFork(child_session_id=str(child)):
            yield child
