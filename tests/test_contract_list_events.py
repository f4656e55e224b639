"""list_events, as the contract has it: the nine events, and schemas that tell good from bad."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.test_contract_events import Caller, calling, event, turn_end

FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "turn_start": ({"session_id"}, {"lookup_id"}),
    "turn_end": (
        {"session_id", "kv_transfer_params"},
        {"debug_context", "seq", "finish_reason"},
    ),
    "snapshot_restore": ({"session_id"}, {"source_session_id"}),
    "session_map": ({"session_id"}, set()),
    "session_close": ({"session_id"}, set()),
    "session_suspend": ({"session_id"}, set()),
    "session_fork": ({"session_id"}, {"child_session_id"}),
    "session_fork_end": ({"session_id"}, {"fork_id"}),
    "health": (set(), set()),
}
"""Required and optional fields, as the contract's table has them."""

KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def is_valid(value: Any, schema: Any, root: Any) -> bool:
    """A small JSON Schema validator, which refuses keywords that it does not know."""
    return all(_holds(word, schema, value, root) for word in schema)


def _holds(word: str, schema: Any, value: Any, root: Any) -> bool:
    rule = schema[word]
    match word:
        case "title" | "description" | "default" | "examples" | "$defs" | "$schema" | "$id":
            return True
        case "$ref":
            target = root
            for step in rule.removeprefix("#/").split("/"):
                target = target[step]
            return is_valid(value, target, root)
        case "type":
            kinds = [rule] if isinstance(rule, str) else rule
            return any(
                isinstance(value, KINDS[kind]) and isinstance(value, bool) == (kind == "boolean")
                for kind in kinds
            )
        case "const":
            return bool(value == rule)
        case "enum":
            return value in rule
        case "anyOf":
            return any(is_valid(value, option, root) for option in rule)
        case "required":
            return not isinstance(value, dict) or set(rule) <= set(value)
        case "properties":
            return not isinstance(value, dict) or all(
                is_valid(value[key], rule[key], root) for key in rule.keys() & value.keys()
            )
        case "items":
            return not isinstance(value, list) or all(is_valid(item, rule, root) for item in value)
        case "additionalProperties":
            others = {} if not isinstance(value, dict) else value.keys() - schema["properties"]
            return rule is True or (rule is False and not others) or rule == {}
        case "minLength":
            return not isinstance(value, str) or len(value) >= rule
        case "maxLength":
            return not isinstance(value, str) or len(value) <= rule
        case "minItems":
            return not isinstance(value, list) or len(value) >= rule
        case "maxItems":
            return not isinstance(value, list) or len(value) <= rule
        case "minimum":
            return not isinstance(value, int | float) or value >= rule
        case "maximum":
            return not isinstance(value, int | float) or value <= rule
    raise AssertionError(f"unknown keyword {word!r} in {schema}")


async def list_events(caller: Caller) -> dict[str, Any]:
    response = await caller.post(event("list_events"))
    reply = response.json()
    assert response.status_code == 200
    assert (reply["ok"], reply["type"], set(reply)) == (True, "list_events", {"ok", "type", "data"})
    assert set(reply["data"]) == {"events"}
    events: dict[str, Any] = reply["data"]["events"]
    return events


async def test_list_events_describes_exactly_the_nine_events(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        events = await list_events(caller)
        assert set(events) == set(FIELDS)
        for name, entry in events.items():
            required, optional = FIELDS[name]
            assert set(entry) == {"description", "required", "optional", "schema"}
            assert isinstance(entry["description"], str)
            assert entry["description"]
            assert isinstance(entry["required"], list)
            assert sorted(entry["required"]) == sorted(required)
            assert isinstance(entry["optional"], list)
            assert sorted(entry["optional"]) == sorted(optional)
            assert isinstance(entry["schema"], dict)


PARAMS: dict[str, Any] = {"kv_transfer_params": {"chunk_hashes": ["a", "b"], "more": None}}

GOOD: dict[str, Any] = {
    **PARAMS,
    "session_id": "s",
    "debug_context": {"messages": [{}], "timing": {"ttft_ms": 1.5, "tpot_ms": 2}},
    "seq": 3,
    "finish_reason": "stop",
    "lookup_id": "l",
    "source_session_id": "s",
    "child_session_id": "c",
    "fork_id": 1,
}


def bodies(type_: str) -> list[dict[str, Any]]:
    """Requests of one kind, good and bad: minimal, full, and each field gone or spoiled."""
    required, optional = FIELDS[type_]
    full = event(type_, **{field: GOOD[field] for field in sorted(required | optional)})
    found = [full, event(type_, **{field: GOOD[field] for field in required})]
    found.append({**full, "unknown": [1]})
    found += [{key: full[key] for key in full if key != gone} for gone in full]
    found += [
        {**full, field: bad}
        for field in full
        for bad in (7.5, True, [], [1], None)
        if (field, bad) != ("type", True)
    ]
    if type_ == "turn_end":
        lists: list[Any] = [None, "a", {}, ["a", 1], [None], [["a"]], ["a"], []]
        found += [{**full, "kv_transfer_params": {"chunk_hashes": each}} for each in lists]
        contexts: list[Any] = [{"messages": 1}, {"timing": "x"}, {"timing": {"ttft_ms": "x"}}]
        found += [{**full, "debug_context": each} for each in [*contexts, {"timing": {}}]]
    return found


async def test_each_schema_accepts_what_the_daemon_accepts_and_nothing_else(
    tmp_path: Path,
) -> None:
    """A body is bad for the schema exactly where it is bad for the daemon."""
    async with calling(tmp_path) as caller:
        events = await list_events(caller)
        for type_ in FIELDS:
            schema = events[type_]["schema"]
            verdicts = set()
            for body in bodies(type_):
                response = await caller.post(body)
                accepted = response.status_code != 400
                assert is_valid(body, schema, schema) is accepted, (body, response.text)
                verdicts.add(accepted)
            assert verdicts == {True, False}


async def test_the_schemas_refuse_empty_strings_as_the_daemon_does(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        events = await list_events(caller)
        nameless = [event(type_, "", **PARAMS) for type_ in FIELDS if type_ != "health"]
        accepted = []
        for body in [*nameless, turn_end("s", "a", "")]:
            schema = events[body["type"]]["schema"]
            assert (await caller.post(body)).status_code == 400
            if is_valid(body, schema, schema):
                accepted.append(body)
        assert accepted == []
