"""Routes that say what this engine is: versions, inference, `/conf` and `/meta`."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from quart import Response, request
from quart_trio import QuartTrio

from ramakv import __version__
from ramakv.lmcache.embedded.conf import select
from ramakv.lmcache.embedded.node import MODEL_NAME, Node
from ramakv.lmcache.embedded.replies import (
    RefusedError,
    body_bytes,
    refuse,
    reply,
    reply_indented,
    reply_text,
)

COMMIT_ID = "embedded"
OBSERVED_VERSION = "0.4.4"
OBSERVED_COMMIT_ID = "g6fbec463e"

_JSON = "application/json"
_JSON_AS_TEXT = "text/plain; charset=utf-8"


def add_version_routes(app: QuartTrio, node: Node) -> None:
    """Add `/lmc_version`, `/commit_id`, `/version` and `/inference_*`."""
    version, commit_id = __version__, COMMIT_ID
    if node.observed:
        version, commit_id = OBSERVED_VERSION, OBSERVED_COMMIT_ID

    def text(value: str) -> Response:
        return reply(value) if node.observed else reply_text(value)

    @app.get("/lmc_version")
    async def lmc_version() -> Response:
        return text(version)

    @app.get("/commit_id")
    async def commit() -> Response:
        return text(commit_id)

    @app.get("/version")
    async def full_version() -> Response:
        return text(f"{version}-{commit_id}")

    @app.get("/inference_info")
    async def inference_info() -> Response:
        try:
            return reply(_inference_info(node))
        except Exception as error:
            raise refuse(500, "Failed to get inference info", str(error)) from error

    @app.get("/inference_version")
    async def inference_version() -> Response:
        if node.observed:
            raise refuse(
                500,
                "Failed to get inference version",
                "'LMCacheManager' object has no attribute 'get_inference_version'",
            )
        return reply({"vllm_version": f"{__version__}+{COMMIT_ID}"})


def add_conf_routes(app: QuartTrio, node: Node) -> None:
    """Add `/conf` and `/meta`."""
    content_type = _JSON_AS_TEXT if node.observed else _JSON

    @app.get("/conf")
    async def conf() -> Response:
        return reply_indented(node.conf.values(request.args.get("names")), content_type)

    @app.post("/conf")
    async def set_conf() -> Response:
        changes = _conf_body(await body_bytes())
        result = node.conf.update(changes)
        answer: dict[str, Any] = {"updated": result.updated}
        if result.errors:
            answer["errors"] = result.errors
        accepted = not result.errors or (node.observed and result.updated)
        return reply(answer, 200 if accepted else 400)

    @app.get("/meta")
    async def meta() -> Response:
        return reply_indented(select(node.meta(), request.args.get("names")), content_type)


def _conf_body(data: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise refuse(400, "Invalid JSON body", _in_pythons_words(data) or str(error)) from error
    if not isinstance(body, dict):
        raise RefusedError(400, "Request body must be a JSON object")
    return body


def _in_pythons_words(data: bytes) -> str:
    """Say what is wrong with a body as LMCache does, where its decoder finds anything wrong."""
    try:
        json.loads(data)
    except (ValueError, RecursionError) as error:
        return str(error)
    return ""


def _inference_info(node: Node) -> dict[str, Any]:
    return {
        "vllm_config": {
            "model": MODEL_NAME,
            "tensor_parallel_size": node.world_size,
            "block_size": node.config.chunk_size,
        },
        "lmcache": {
            "version": __version__,
            "role": node.role,
            "instance_id": node.conf["lmcache_instance_id"],
            "chunk_size": node.config.chunk_size,
            "behaviour": node.config.behaviour,
            "locations": list(node.engine.switches.locations) if node.engine else [],
        },
    }
