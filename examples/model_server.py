"""A stand-in for an inference engine: an OpenAI-compatible endpoint that needs no model.

It answers POST /v1/chat/completions, streamed or not, with a made-up sentence. As vLLM with LMCache
does, it cuts the prompt into chunks, hashes each together with all before it, and reports these
hashes in the last chunk of the answer, as `kv_transfer_params`.

    python examples/model_server.py --port 8000
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHUNK_CHARS = 64
"""A real engine counts tokens; 256 of them are a chunk, usually."""


def chunk_hashes(messages: list[dict[str, Any]]) -> list[str]:
    """Hash the full chunks of a prompt; each hash stands for the prompt up to its chunk's end."""
    text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
    ends = range(CHUNK_CHARS, len(text) + 1, CHUNK_CHARS)
    return [hashlib.sha256(text[:end].encode()).hexdigest()[:16] for end in ends]


def answer(messages: list[dict[str, Any]]) -> str:
    """Make up an answer."""
    return f"I have read {len(messages)} messages, and have nothing to add."


class Handler(BaseHTTPRequestHandler):
    """Answers one request after another on a connection."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Complete a chat."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/chat/completions":
            self.send_error(404)
            return
        if body.get("stream"):
            data = b"".join(b"data: %b\n\n" % part for part in stream(body))
            self.reply(data, "text/event-stream")
        else:
            self.reply(json.dumps(whole(body)).encode(), "application/json")

    def reply(self, data: bytes, kind: str) -> None:
        """Send a response."""
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


def whole(body: dict[str, Any]) -> dict[str, Any]:
    """Make the answer in one piece."""
    message = {"role": "assistant", "content": answer(body["messages"])}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {
        "object": "chat.completion",
        "model": body.get("model", "stand-in"),
        "choices": [choice],
        "kv_transfer_params": {"chunk_hashes": chunk_hashes(body["messages"])},
    }


def stream(body: dict[str, Any]) -> Iterator[bytes]:
    """Make the answer a word at a time; the last chunk carries `kv_transfer_params`."""
    base = {"object": "chat.completion.chunk", "model": body.get("model", "stand-in")}
    for word in answer(body["messages"]).split(" "):
        delta = {"content": f"{word} "}
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
        yield json.dumps({**base, "choices": [choice]}).encode()
    choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
    params = {"chunk_hashes": chunk_hashes(body["messages"])}
    yield json.dumps({**base, "choices": [choice], "kv_transfer_params": params}).encode()
    yield b"[DONE]"


@contextmanager
def serving(port: int = 0) -> Iterator[str]:
    """Serve on loopback until the block ends; gives the base address."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="a stand-in for an inference engine")
    parser.add_argument("--port", type=int, default=8000)
    with serving(parser.parse_args().port) as url:
        print(f"serving {url}")
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
