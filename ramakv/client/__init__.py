"""The Python client of ramakv, for agents: async (asyncio, trio) and sync.

    async with Client() as client, client.session("s1") as session:
        async with session.turn() as turn:
            answer = await ask_the_model()
            turn.end(answer.kv_transfer_params["chunk_hashes"])

It needs anyio, httpx and msgspec, and imports nothing of the daemon.
"""

from ramakv.client.aio import Client
from ramakv.client.counters import Counters
from ramakv.client.delivery import Delivery
from ramakv.client.messages import Reply
from ramakv.client.session import Fork, Session, Turn
from ramakv.client.sync import SyncClient, SyncDelivery
from ramakv.errors import (
    AnswerTimeoutError,
    ClientError,
    ConfigError,
    DaemonUnavailableError,
    EventDroppedError,
    EventInvalidError,
    EventRefusedError,
    EventSkippedError,
    OutcomeUnknownError,
)

__all__ = [
    "AnswerTimeoutError",
    "Client",
    "ClientError",
    "ConfigError",
    "Counters",
    "DaemonUnavailableError",
    "Delivery",
    "EventDroppedError",
    "EventInvalidError",
    "EventRefusedError",
    "EventSkippedError",
    "Fork",
    "OutcomeUnknownError",
    "Reply",
    "Session",
    "SyncClient",
    "SyncDelivery",
    "Turn",
]
