"""An agent that talks to a model and reports its turns to ramakv.

Everything about ramakv is in the lines that are marked. Run it offline, each in a terminal:

    ramakv serve --backend embedded
    python examples/model_server.py
    python examples/agent.py --ramakv http://127.0.0.1:6998
"""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx

from ramakv.client import Client  # ramakv

QUESTIONS = (
    "What does a KV cache keep?",
    "And what is lost when it evicts my chunks while I wait for a tool?",
    "So who should tell it what I will need next?",
)


async def stream_chat(
    http: httpx.AsyncClient, messages: list[dict[str, str]]
) -> AsyncIterator[dict[str, Any]]:
    """Ask the model, and give each chunk of its answer."""
    body = {"model": "stand-in", "messages": messages, "stream": True}
    async with http.stream("POST", "chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


async def run_agent(model_url: str, ramakv_url: str | None, session_id: str) -> None:
    """Have a conversation of a few turns."""
    messages = [{"role": "system", "content": "You are a helpful assistant of few words."}]
    async with (
        httpx.AsyncClient(base_url=model_url, trust_env=False) as http,
        Client(ramakv_url) as ramakv,  # ramakv
        ramakv.session(session_id) as session,  # ramakv
    ):
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            async with session.turn() as turn:  # ramakv: it brings the session's chunks up
                text, params, reason = "", {}, None
                async for chunk in stream_chat(http, messages):
                    (choice,) = chunk["choices"]
                    text += choice["delta"].get("content", "")
                    reason = choice["finish_reason"] or reason
                    params = chunk.get("kv_transfer_params") or params
                turn.end(params.get("chunk_hashes"), finish_reason=reason)  # ramakv
            messages.append({"role": "assistant", "content": text})
            print(f"> {question}\n{text}")
        reply = await session.map()  # ramakv: only to show what it knows now
        print(f"ramakv knows {len(reply.data.get('chunk_hashes', []))} chunks of this session")


def main() -> None:
    """Read the addresses and run."""
    parser = argparse.ArgumentParser(description="an agent that reports its turns to ramakv")
    parser.add_argument("--model", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--ramakv", help="default: as ~/.config/ram-a-kv/config.toml says")
    parser.add_argument("--session", default=f"example-{uuid.uuid4().hex[:8]}")
    given = parser.parse_args()
    asyncio.run(run_agent(given.model, given.ramakv, given.session))


if __name__ == "__main__":
    main()
