"""Traces: what one event was about, from its request to the call at LMCache that it leads to.

Actors have tasks of their own, so a trace travels with the messages: whoever sends one puts
`current()` into it, and whoever works on it goes on with `resumed`. What is done for many at once,
a transaction or an evict, is a trace of its own, with links to theirs.

Where traces are off, `current()` is None everywhere, and nothing more happens. What spans are, and
where they go, is `otel`'s: it is loaded where they are on, and only then need be installed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import islice
from typing import Final, Protocol

LINKS_MAX: Final = 128
"""More links of a span than this are dropped by OpenTelemetry."""

_RELEASES_MAX: Final = 1000
"""Transactions whose traces are remembered, for the evicts of what they released."""

Facts = Mapping[str, str | int | bool]


class Trace(Protocol):
    """A span that is under way. One that it begins is the current one until its block ends."""

    is_sampled: bool
    """Whether it is exported. Where not, no more spans are begun."""

    def child(self, name: str, *, is_call: bool) -> AbstractContextManager[Trace]:
        """Begin a span for a part of this one; `is_call`: a request to somebody else."""

    def linked(
        self, name: str, others: Sequence[Trace], *, is_call: bool
    ) -> AbstractContextManager[Trace]:
        """Begin a trace of its own that is about all of these."""

    def headers(self) -> Mapping[str, str]:
        """Return what a request carries, so that whoever gets it goes on with this trace."""

    def note(self, facts: Facts) -> None:
        """Add facts to the span."""


_current: ContextVar[Trace | None] = ContextVar("trace", default=None)
_OFF: Final = nullcontext(None)
Span = AbstractContextManager[Trace | None]

current = _current.get
"""Return the trace that this task works on, or None."""

make_current = _current.set
"""Work on a trace from here on, or, with None, on none: a task begins with that of its maker."""

restore = _current.reset
"""Go back to what was before `make_current`, which returned this token."""


def span(name: str) -> Span:
    """Begin a span for a part of what this task works on."""
    trace = _current.get()
    return _OFF if trace is None or not trace.is_sampled else trace.child(name, is_call=False)


def resumed(trace: Trace | None, name: str, *, is_call: bool = False) -> Span:
    """Go on with a trace in another task."""
    if trace is None:
        return _OFF
    return trace.child(name, is_call=is_call) if trace.is_sampled else _passing_on(trace)


@contextmanager
def _passing_on(trace: Trace) -> Iterator[None]:
    """Make a trace the current one, without a span: whoever is called may want to know."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


def joined(traces: Iterable[Trace | None], name: str, *, is_call: bool = False) -> Span:
    """Do something for many at once; it is a trace where it is about one that is sampled."""
    sampled = (trace for trace in traces if trace is not None and trace.is_sampled)
    known = list(islice(sampled, LINKS_MAX))
    return known[0].linked(name, known, is_call=is_call) if known else _OFF


class Releases:
    """Who released what an evict is about: traces by the generation of their transaction."""

    def __init__(self) -> None:
        self._traces: OrderedDict[int, Sequence[Trace]] = OrderedDict()

    def add(self, generation: int, traces: Sequence[Trace]) -> None:
        """Remember those of a transaction; where there are many, the oldest are forgotten."""
        if traces:
            self._traces[generation] = traces
            if len(self._traces) > _RELEASES_MAX:
                self._traces.popitem(last=False)

    def of(self, generations: Iterable[int]) -> Iterator[Trace]:
        """Return those of these transactions, each once."""
        for generation in dict.fromkeys(generations) if self._traces else ():
            yield from self._traces.get(generation, ())
