"""What operators see of residency: who is in, who is out, why, and what the duel says."""

from __future__ import annotations

from msgspec import Struct

from ramakv.core.pauses import Reason
from ramakv.web.operable import Operable

SESSIONS_MAX = 200
"""Most sessions that are shown: those whose turns ended last."""


class ResidencyRow(Struct):
    """How one session stands."""

    id: str
    seat: str
    """`in a turn`, `in`, or `out`."""
    why: str
    chunks: int
    paused_seconds: float | None
    """Since its turn ended; null in a turn."""
    hits_per_second: float
    """Hits that each of its chunks may be expected to bring, for each second that it stays."""
    hot_share: float | None
    """Of what its last turn began with, as far as is known."""


class DuelView(Struct):
    """Both ways on the load of late, each in a shadow of the hot tier."""

    turns: int
    lru_share: float
    sticky_share: float


class ResidencyView(Struct):
    """Everything about residency."""

    policy: str
    in_force: bool
    why_off: str
    """Why nothing is done; empty where something is, or would be if it paid."""
    hot_chunks_max: int
    hot_share: float | None
    duel: DuelView | None
    residents: int
    sessions_known: int
    done: dict[str, int]
    """For how many sessions, one counted each time, LMCache accepted a call."""
    pauses: dict[Reason, dict[str, float]]
    """For each reason why turns stop: the share of pauses that are over after so long."""
    sessions: list[ResidencyRow]


def look_at_residency(service: Operable) -> ResidencyView:
    """Look at it as it is now."""
    residency = service.residency
    rules = residency.rules
    done = {action.value: count for action, count in residency.done.items()}
    if rules is None:
        why = residency.why_off or "LMCache was not asked yet what its hot tier holds"
        return ResidencyView(residency.policy, False, why, 0, None, None, 0, 0, done, {}, [])
    duel = rules.duel
    rows = [
        ResidencyRow(
            row.session_id,
            row.seat.value,
            row.why,
            row.chunks,
            row.paused_seconds,
            row.hits_per_second,
            row.hot_share,
        )
        for row in residency.standings(SESSIONS_MAX)
    ]
    return ResidencyView(
        residency.policy,
        rules.is_in_force,
        "",
        rules.capacity,
        rules.hot_share,
        DuelView(duel.turns, duel.lru_share, duel.challenger_share),
        rules.residents(),
        len(rules),
        done,
        rules.learned(),
        rows,
    )
