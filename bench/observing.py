"""What it costs to be observed: CPU time of an event with and without counting, and with traces.

`python -m bench.observing`, about two minutes. Everything happens in one process, where the server
calls the app, in blocks that take turns: on a machine that others use, that stays comparable. HTTP
is left out, and would make every ratio smaller.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import msgspec
import trio

from ramakv.config import Config
from ramakv.core.tallies import EventTallies, Histogram
from ramakv.lmcache.client import NoopBackend
from ramakv.logs import configure_logs
from ramakv.service import Service, open_service
from ramakv.web.event_app import create_event_app
from ramakv.web.metrics import render

SESSIONS, CHUNKS, FRESH, AT_ONCE = 64, 200, 10, 64
EVENTS = {"health": 1500, "turn_end": 192}
"""In a block: some tens of milliseconds."""
SCOPE = {"type": "http", "method": "POST", "path": "/event", "headers": []}
App = Callable[..., Any]


def bodies(type_: str, rng: random.Random, maps: list[list[str]]) -> list[bytes]:
    """What one block sends; each turn_end brings fresh hashes."""
    if type_ == "health":
        return [b'{"type": "health"}'] * EVENTS[type_]
    sent = []
    for number in range(EVENTS[type_]):
        chunk_map = maps[number % SESSIONS]
        chunk_map[-FRESH:] = [f"{rng.getrandbits(256):064x}" for _ in range(FRESH)]
        event = {
            "type": type_,
            "session_id": f"s{number % SESSIONS}",
            "kv_transfer_params": {"chunk_hashes": chunk_map},
        }
        sent.append(msgspec.json.encode(event))
    return sent


async def microseconds(app: App, todo: list[bytes]) -> float:
    """Have all answered, many at once; CPU time of one."""
    count = len(todo)

    async def work() -> None:
        while todo:
            body = todo.pop()

            async def receive(body: bytes = body) -> dict[str, Any]:
                return {"type": "http.request", "body": body, "more_body": False}

            await app(SCOPE, receive, _ignore)

    began = time.process_time()
    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(work)
    return (time.process_time() - began) / count * 1e6


async def _ignore(message: object) -> None:
    pass


@contextmanager
def uncounted() -> Iterator[None]:
    """Count nothing until the block ends."""
    answered, observe = EventTallies.answered, Histogram.observe
    EventTallies.answered = Histogram.observe = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        EventTallies.answered, Histogram.observe = answered, observe  # type: ignore[method-assign]


def traced(service: Service, config: Config, share: float) -> App:
    """The app with traces, of which a share is taken; spans are encoded, and go nowhere."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    from ramakv.otel import Traces
    from ramakv.web.traced import TracedApp, TracedHandler

    class Nowhere(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            encode_spans(spans).SerializeToString()
            return SpanExportResult.SUCCESS

    os.environ["OTEL_TRACES_SAMPLER"] = "parentbased_traceidratio"
    os.environ["OTEL_TRACES_SAMPLER_ARG"] = str(share)
    traces = Traces(BatchSpanProcessor(Nowhere()))
    return TracedApp(create_event_app(TracedHandler(service), config), traces)


async def measure(folder: Path, rounds: int) -> None:
    """Print a line for each comparison: median of each side, median of the ratios."""
    config = Config(session_store_path=str(folder / "sessions.db"))
    rng = random.Random(1)
    maps = [[f"{rng.getrandbits(256):064x}" for _ in range(CHUNKS)] for _ in range(SESSIONS)]
    async with open_service(config, client=NoopBackend()) as service:
        app = create_event_app(service, config, tallies=service.answered)
        all_, few = traced(service, config, 1.0), traced(service, config, 0.01)
        for type_ in EVENTS:
            for what, without, with_, around in (
                ("counting", app, app, uncounted),
                ("1 % of traces", app, few, nullcontext),
                ("all traces", app, all_, nullcontext),
            ):
                pairs = []
                for number in range(rounds + 1):
                    pair = {}
                    for side in sorted((0, 1), reverse=bool(number % 2)):
                        with nullcontext() if side else around():
                            todo = bodies(type_, rng, maps)
                            pair[side] = await microseconds(with_ if side else without, todo)
                    pairs.append((pair[0], pair[1]))
                report(type_, what, pairs[1:])  # the first is to warm up
        began = time.process_time()
        for _ in range(rounds):
            await render(service)
        print(f"one look at the figures: {(time.process_time() - began) / rounds * 1e3:.1f} ms")


def report(type_: str, what: str, pairs: list[tuple[float, float]]) -> None:
    """Print one comparison."""
    before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"{type_:9} {what:14} {before:7.1f} -> {after:7.1f} us, ratio {ratio:.3f}")


@click.command()
@click.option("--rounds", default=30, show_default=True, help="Pairs of blocks a comparison.")
def main(rounds: int) -> None:
    """Measure what counting and traces cost an event."""
    configure_logs("warning")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        trio.run(measure, Path(folder), rounds)


if __name__ == "__main__":
    main()
