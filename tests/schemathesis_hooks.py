"""What schemathesis cannot learn from a schema of an event."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook  # type: ignore[misc]
def filter_case(context: Any, case: Any) -> bool:
    """Leave out what a schema allows and the daemon refuses.

    A session is not forked into itself; and 5.0, an integer in JSON Schema, is none to the daemon.
    """
    body = case.body
    if not isinstance(body, dict):
        return True
    into_itself = body.get("session_id") == body.get("child_session_id")
    has_point = any(isinstance(body.get(name), float) for name in ("seq", "fork_id"))
    return not has_point and not (into_itself and body.get("type") == "session_fork")
