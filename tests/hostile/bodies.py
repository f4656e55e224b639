"""Strategies for bodies: anything at all, what is nearly JSON, nearly an event, or one."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from ramakv.events import EVENTS

TOKENS = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"null", b"-", b"e9999", b"\xff", b"\0"]
NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**53, 2**63 - 1, 2**63, -(2**63), 10**400]),
    st.floats(),  # with NaN and the infinities, as some writers put them
)
TEXTS = st.one_of(
    st.sampled_from(["", "a", "b", "h-1", "\0", "\ud800", "😀" * 13, "x" * 12, "x" * 13, "../.."]),
    st.text(max_size=6),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=12,
)
TYPES = st.one_of(st.sampled_from([*EVENTS, "list_events"]), VALUES)
HASHES = st.lists(st.one_of(TEXTS, st.sampled_from(["a", "b", "c", "d"])), max_size=24)
SESSION_IDS = st.sampled_from(["s", "t", "u\0", "é", "😀"])


def _or_wrong(right: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(right, right, right, VALUES)


EVENT_LIKE = st.fixed_dictionaries(
    {},
    optional={
        "type": TYPES,
        "session_id": _or_wrong(SESSION_IDS),
        "kv_transfer_params": _or_wrong(
            st.fixed_dictionaries({}, optional={"chunk_hashes": _or_wrong(HASHES), "x": VALUES})
        ),
        "debug_context": _or_wrong(
            st.fixed_dictionaries(
                {},
                optional={
                    "messages": _or_wrong(st.lists(VALUES, max_size=3)),
                    "timing": _or_wrong(st.dictionaries(st.sampled_from(["ttft_ms"]), NUMBERS)),
                },
            )
        ),
        "seq": NUMBERS,
        "fork_id": NUMBERS,
        "source_session_id": _or_wrong(SESSION_IDS),
        "child_session_id": _or_wrong(SESSION_IDS),
        "lookup_id": TEXTS,
        "finish_reason": VALUES,
        "x": VALUES,
    },
)
GOOD = st.one_of(
    st.builds(
        lambda session_id, hashes: {
            "type": "turn_end",
            "session_id": session_id,
            "kv_transfer_params": {"chunk_hashes": hashes},
        },
        SESSION_IDS,
        st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=6),
    ),
    st.builds(
        lambda type_, session_id: {"type": type_, "session_id": session_id},
        st.sampled_from([name for name in EVENTS if name != "turn_end"]),
        SESSION_IDS,
    ),
)
EVENTS_LIKE = st.one_of(EVENT_LIKE, GOOD)


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes with some of them changed, lost, put in, or there twice."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 5)))
        data[start:end] = draw(
            st.one_of(
                st.binary(max_size=3),
                st.just(bytes(data[start : start + 20]) * 2),
                st.sampled_from(
                    [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"e9999", b"\xff"]
                ),
            )
        )
    return bytes(data)


def _written(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


WRITTEN = st.one_of(
    EVENTS_LIKE.map(_written),
    st.lists(EVENTS_LIKE, max_size=10).map(_written),
    VALUES.map(_written),
)
BODIES = st.one_of(st.binary(max_size=200), WRITTEN, WRITTEN, damaged(WRITTEN))
"""Anything a client may send as a body."""
