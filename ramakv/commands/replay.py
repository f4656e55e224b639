"""`ramakv replay`: drives a daemon, and an engine beside it, with a recorded trace.

Each request is a turn: `turn_start` when it arrives, then the engine retrieves and stores its
chunks (only with an engine URL), then `turn_end` once the recorded or modelled service time has
passed. A session's turns are strictly in order, each after the answer to the one before;
sessions run side by side.
"""

from __future__ import annotations

import math
import os
import signal
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import trio
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from ramakv.commands.replay_http import HttpCalls, usable_url
from ramakv.commands.replay_report import ENGINE_PREFIX, Answer, Report, percentile, render
from ramakv.commands.trace import Request, Survey, chunk_hash, read_trace, survey
from ramakv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

__all__ = ["Answer", "HttpCalls", "Replay", "Report", "percentile", "render", "replay", "run"]

TURNS_UNDER_WAY_FULL_SPEED_MAX = 16
TURNS_UNDER_WAY_PACED_MAX = 1024
CALLS_UNDER_WAY_MAX = 64
SILENT_CALLS_MAX = 50

_FINISH_REASONS = {"tool_use": "tool_calls", "end_turn": "stop"}


class Replay:
    """Plays requests through `send`, which carries one call and says what became of it.

    Requests are admitted in the trace's order, with a bounded number of turns under way, and a
    bounded number of calls. At full speed (`speed=None`) nothing else waits. Paced, a request is
    admitted when it is due, the trace's first one at once, and its `turn_end` is due when its
    service time has passed since the turn began.
    """

    def __init__(
        self,
        send: Callable[[str, bytes], Awaitable[Answer]],
        *,
        report: Report | None = None,
        speed: float | None = None,
        engine: bool = False,
        last: Mapping[str, int] | None = None,
        on_turn: Callable[[], None] = lambda: None,
        turns_max: int | None = None,
        silent_calls_max: int = SILENT_CALLS_MAX,
    ) -> None:
        """Prepare to play.

        `send` carries one call, given its kind and body. `report` is filled in as the replay
        goes, so that it outlives a cancellation. `speed` is how many times faster than the trace
        to go; None leaves out every pause. `last` holds each session's last position, after
        which it is closed. `turns_max` bounds the turns under way, those included that wait for
        their session's earlier one; `silent_calls_max` calls in a row without an answer end it.
        """
        self.report = report or Report()
        self._send = send
        self._speed = speed
        self._engine = engine
        self._last = last or {}
        self._on_turn = on_turn
        usual = TURNS_UNDER_WAY_FULL_SPEED_MAX if speed is None else TURNS_UNDER_WAY_PACED_MAX
        self._turns = trio.Semaphore(turns_max or usual)
        self._calls = trio.CapacityLimiter(CALLS_UNDER_WAY_MAX)
        self._latest: dict[str, trio.Event] = {}
        self._silent = {"daemon": 0, "engine": 0}
        self._silent_calls_max = silent_calls_max
        self._scope = trio.CancelScope()

    async def run(self, requests: Iterable[Request]) -> Report:
        """Play all requests and return the report."""
        began = trio.current_time()
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    try:
                        await self._admit(requests, began, nursery)
                    except ConfigError as error:  # the trace is not what was surveyed
                        self._stop(str(error))
        finally:
            self.report.seconds = trio.current_time() - began
        return self.report

    async def _admit(
        self, requests: Iterable[Request], began: float, nursery: trio.Nursery
    ) -> None:
        first_t: float | None = None
        for position, request in enumerate(requests):
            first_t = request.t if first_t is None else first_t
            due = None if self._speed is None else began + (request.t - first_t) / self._speed
            if due is not None:
                await trio.sleep_until(due)
            await self._turns.acquire()
            if due is not None:
                behind = trio.current_time() - due
                self.report.behind_seconds = max(self.report.behind_seconds, behind)
            closes = self._last.get(request.session) == position
            earlier, over = self._latest.get(request.session), trio.Event()
            self._latest[request.session] = over
            nursery.start_soon(self._play, request, closes, earlier, over)

    async def _play(
        self, request: Request, closes: bool, earlier: trio.Event | None, over: trio.Event
    ) -> None:
        session = request.session
        try:
            if earlier is not None:
                await earlier.wait()
            began = trio.current_time()
            hashes = msgspec.Raw(msgspec.json.encode([chunk_hash(h) for h in request.hashes]))
            await self._call("turn_start", {"type": "turn_start", "session_id": session})
            if self._engine and request.hashes:
                await self._call("engine_retrieve", {"chunk_hashes": hashes})
                await self._call("engine_store", {"chunk_hashes": hashes})
            if self._speed is not None:
                await trio.sleep_until(began + request.service_seconds() / self._speed)
            end: dict[str, Any] = {
                "type": "turn_end",
                "session_id": session,
                "kv_transfer_params": {"chunk_hashes": hashes},
            }
            if request.stop in _FINISH_REASONS:
                end["finish_reason"] = _FINISH_REASONS[request.stop]
            await self._call("turn_end", end)
            if closes:
                await self._call("session_close", {"type": "session_close", "session_id": session})
            self.report.requests += 1
            self._on_turn()
        finally:
            over.set()
            if self._latest.get(session) is over:
                del self._latest[session]
            self._turns.release()

    async def _call(self, kind: str, message: dict[str, Any]) -> None:
        body = msgspec.json.encode(message)
        async with self._calls:
            began = trio.current_time()
            answer = await self._send(kind, body)
            self.report.record(kind, trio.current_time() - began, answer)
        side = "engine" if kind.startswith(ENGINE_PREFIX) else "daemon"
        self._silent[side] = 0 if answer.answered else self._silent[side] + 1
        if self._silent[side] >= self._silent_calls_max:
            self._stop(f"{self._silent[side]} calls in a row got no answer from the {side}")

    def _stop(self, why: str) -> None:
        self.report.stopped = self.report.stopped or why
        self._scope.cancel()


async def replay(
    trace: Path,
    url: str,
    engine_url: str | None = None,
    *,
    speed: float | None = None,
    limit: int | None = None,
    close: bool = False,
    token: str | None = None,
    ca_file: str | None = None,
    plan: Survey | None = None,
    report: Report | None = None,
    on_turn: Callable[[], None] = lambda: None,
) -> Report:
    """Replay a trace over HTTP; where no daemon or engine answers, say so in the report.

    `plan` is the trace's survey, where the caller has it already, and `report` is filled in as
    the replay goes. Raises ConfigError if the trace cannot be read or a URL cannot be used.
    """
    report = report or Report()
    plan = plan or survey(trace, limit)
    async with aclosing(HttpCalls(url, engine_url, token=token, ca_file=ca_file)) as calls:
        report.stopped = await calls.unreachable()
        if report.stopped is not None:
            return report
        player = Replay(
            calls.send,
            report=report,
            speed=speed,
            engine=engine_url is not None,
            last=plan.last if close else None,
            on_turn=on_turn,
        )
        return await player.run(read_trace(trace, limit))


def run(
    trace: Path,
    url: str,
    engine_url: str | None,
    speed: float | None,
    limit: int | None,
    close: bool,
    json_path: str | None,
    *,
    token: str | None = None,
    ca_file: str | None = None,
) -> int:
    """The command: replay, show progress and summary, and return the exit code.

    `speed` None is full speed. 0: every call succeeded. 1: a call failed, or the daemon or
    engine cannot be reached. 2: usage, or a trace that cannot be read. 130: interrupted.
    """
    errors = Console(stderr=True)
    report = Report()
    try:
        _check_usage(url, engine_url, speed, limit, json_path)
        plan = survey(trace, limit)
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        with Progress(*columns, console=errors, disable=not errors.is_terminal) as bar:
            task = bar.add_task(trace.name, total=plan.requests)
            play = partial(
                replay,
                trace,
                url,
                engine_url,
                speed=speed,
                limit=limit,
                close=close,
                token=token,
                ca_file=ca_file,
                plan=plan,
                report=report,
                on_turn=partial(bar.advance, task),
            )
            trio.run(_interruptible, play, report)
    except ConfigError as error:
        _say(errors, str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    return _show(report, errors, json_path)


async def _interruptible(play: Callable[[], Awaitable[Report]], report: Report) -> None:
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                async for _ in signals:
                    report.interrupted = True
                    nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await play()
            nursery.cancel_scope.cancel()


def _check_usage(
    url: str, engine_url: str | None, speed: float | None, limit: int | None, json_path: str | None
) -> None:
    """Find what is wrong with the arguments before anything is sent."""
    usable_url("--url", url)
    if engine_url is not None:
        usable_url("--engine-url", engine_url)
    if speed is not None and not (speed > 0 and math.isfinite(speed)):
        raise ConfigError(f"--speed {speed:g}: expected max or a number above 0")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit}: expected at least 1")
    if json_path is not None and json_path != "-":
        target = Path(json_path)
        touched = target if target.exists() else target.parent
        if target.is_dir() or not os.access(touched, os.W_OK):
            raise ConfigError(f"--json {json_path}: expected a file that can be written, or -")


def _show(report: Report, errors: Console, json_path: str | None) -> int:
    """Print the summary, write the JSON, and return the exit code."""
    if report.stopped is not None and not report.calls:
        _say(errors, report.stopped)
        return report.exit_code
    output = Console()
    (errors if json_path == "-" else output).print(render(report), soft_wrap=True)
    text = msgspec.json.format(msgspec.json.encode(report.to_json()), indent=2).decode()
    if json_path == "-":
        output.out(text, highlight=False)
    elif json_path is not None:
        try:
            Path(json_path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            _say(errors, f"--json {json_path}: {error.strerror}")
            return report.exit_code or 1
    return report.exit_code


def _say(errors: Console, line: str) -> None:
    errors.print(f"ramakv replay: {line}", markup=False, highlight=False, soft_wrap=True)
