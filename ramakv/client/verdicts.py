"""What an answer means for its event: it is settled, or to be tried again. Pure rules.

An event is tried again only where the contract makes that safe: it certainly changed nothing, or
applying it twice is as good as once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from ramakv.client.messages import Message, Reply, failed
from ramakv.errors import (
    ClientError,
    DaemonUnavailableError,
    EventRefusedError,
    OutcomeUnknownError,
)

RETRY_SECONDS_MAX = 30.0
UNSURE_TRIES_MAX = 5
"""After so many tries without an answer an event is given up: it may be what breaks the daemon."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back over HTTP: the envelope, or None where it was something else."""

    status: int
    envelope: Mapping[str, Any] | None
    retry_after_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class TryAgain:
    """The event is not settled. `wait_seconds`: what the daemon asks for."""

    wait_seconds: float = 0.0
    is_outage: bool = False
    """Nobody was there, or nobody answered: that goes for every event."""


def settle(message: Message, answer: Answer | ClientError, unsure_tries: int) -> Reply | TryAgain:
    """Say what becomes of an event. `unsure_tries`: how often it was sent without an answer."""
    if isinstance(answer, OutcomeUnknownError):
        may_repeat = message.is_repeatable and not message.is_read
        if may_repeat and unsure_tries < UNSURE_TRIES_MAX:
            return TryAgain(is_outage=True)
        return failed(answer)
    if isinstance(answer, DaemonUnavailableError):
        return failed(answer) if message.is_read else TryAgain(is_outage=True)
    if isinstance(answer, ClientError):
        return failed(answer)
    if answer.status == HTTPStatus.SERVICE_UNAVAILABLE and not message.is_read:
        return TryAgain(min(answer.retry_after_seconds, RETRY_SECONDS_MAX))
    if answer.status == HTTPStatus.CONFLICT and unsure_tries and message.type == "turn_end":
        return Reply(True)  # it is the one that an earlier try brought, and that was not answered
    return _read(answer)


def _read(answer: Answer) -> Reply:
    envelope = answer.envelope
    if envelope is None or not isinstance(envelope.get("ok"), bool):
        return failed(
            EventRefusedError(
                f"answered {answer.status} with something that is not the reply to an event; "
                "is it ramakv that listens there?",
                status=answer.status,
            )
        )
    if envelope["ok"]:
        data = envelope.get("data")
        return Reply(True, data if isinstance(data, dict) else {})
    error = str(envelope.get("error", "refused without a reason"))
    if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
        return failed(DaemonUnavailableError(error))
    return failed(EventRefusedError(error, status=answer.status))
