"""How the commands ask the listener for operators."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

import httpx
import msgspec

from ramakv.commands.daemon_client import no_answer
from ramakv.commands.top_view import printable

T = TypeVar("T")


class NoAnswer(Exception):  # noqa: N818 - said in one line, and may pass
    """There is no answer; `is_final`: nor will there be one."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


def ask(client: httpx.Client, url: str, path: str, kind: type[T]) -> T:
    """Return what a path of the listener at `url` answers. Raises NoAnswer."""
    try:
        reply = client.get(path)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoAnswer(no_answer(url, error)) from error
    if reply.status_code == 401:
        raise NoAnswer(
            "the daemon wants a token: give it with --token, or in RAM_A_KV_AUTH_TOKEN",
            is_final=True,
        )
    if reply.status_code == 503:
        raise NoAnswer(_reason(reply))
    if reply.status_code != 200:
        raise NoAnswer(
            f"{url} answered {reply.status_code}: {_reason(reply)}; is it the address for "
            "operators (admin.listen_addr), and not that for events?",
            is_final=True,
        )
    try:
        return msgspec.json.decode(reply.content, type=kind)
    except msgspec.DecodeError as error:
        raise NoAnswer(
            f"{url} answered something else than this version of ramakv expects: {error}",
            is_final=True,
        ) from error


def _reason(reply: httpx.Response) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return printable(str(reply.json()["error"]))
    return reply.reason_phrase or "nothing said"
