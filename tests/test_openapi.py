"""The OpenAPI document: it is current, and the daemon takes and answers what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import trio
from click.testing import CliRunner
from hypothesis import given, settings, strategies as st

from ramakv.cli import main
from ramakv.events import EVENTS
from ramakv.openapi import OPERATIONS, document
from ramakv.problems import Problems
from ramakv.web.access import Bearer
from ramakv.web.admin import Admin
from ramakv.web.admin_app import create_admin_app
from ramakv.web.gate import Gate
from tests.hostile.house import Answer, House, living_in
from tests.operators import operators

ROOT = Path(__file__).parent.parent
DOCUMENT = document()
SCHEMAS = DOCUMENT["components"]["schemas"]
POST_EVENT = DOCUMENT["paths"]["/event"]["post"]


def validator(schema: Any) -> jsonschema.Draft202012Validator:
    """Check for a schema of the document, as one that needs nothing else."""
    text = json.dumps({**schema, "$defs": SCHEMAS})
    alone = json.loads(text.replace("#/components/schemas/", "#/$defs/"))
    return jsonschema.Draft202012Validator(alone)


def content_of(response: Any) -> Any:
    return response["content"]["application/json"]["schema"]


REPLIES = {kind: validator(SCHEMAS[f"{EVENTS[kind].__name__}Reply"]) for kind in EVENTS}
ANSWERS = {
    status: validator(content_of(response)) for status, response in POST_EVENT["responses"].items()
}
REQUEST = validator(content_of(POST_EVENT["requestBody"]))


def test_the_file_in_docs_is_what_the_command_prints() -> None:
    printed = CliRunner().invoke(main, ["openapi"])
    assert printed.exit_code == 0
    written = (ROOT / "docs" / "openapi.json").read_text()
    assert written == printed.output, "run: ramakv openapi > docs/openapi.json"


def test_its_schemas_are_valid_and_lead_nowhere_outside() -> None:
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert named <= set(SCHEMAS)
    assert DOCUMENT["openapi"] == "3.1.0"


def test_every_event_and_every_status_is_in_it() -> None:
    mapping = SCHEMAS["AnyEvent"]["discriminator"]["mapping"]
    assert set(mapping) == {*EVENTS, "list_events"}
    assert set(POST_EVENT["responses"]) == {
        *("200", "400", "401", "404", "405", "408", "409", "413", "500", "503")
    }
    assert "Retry-After" in POST_EVENT["responses"]["503"]["headers"]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with living_in(tmp_path_factory.mktemp("house")) as house:
        yield house


def check_answer(reply: Answer) -> Any:
    ANSWERS[str(reply.status)].validate(reply.envelope)
    return reply.envelope


SAYS_NOTHING = {"title", "description", "default", "$defs"}


def fitting(schema: Any) -> st.SearchStrategy[Any]:
    """Whatever a schema of the document allows."""
    words = schema.keys() - SAYS_NOTHING
    if "$ref" in schema:
        return fitting(SCHEMAS[schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return st.one_of(*map(fitting, schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object":
            assert words <= {"type", "properties", "required"}
            fields = {name: fitting(field) for name, field in schema["properties"].items()}
            needed = {name: fields.pop(name) for name in schema.get("required", ())}
            return st.fixed_dictionaries(needed, optional=fields)
        case "array":
            assert words <= {"type", "items", "maxItems"}
            return st.lists(fitting(schema["items"]) if "items" in schema else ANY, max_size=9)
        case "string":
            assert words <= {"type", "minLength", "maxLength"}
            most = schema.get("maxLength", 30)
            return st.text(TEXT, min_size=schema.get("minLength", 0), max_size=most)
        case "integer":
            assert words <= {"type", "minimum", "maximum"}
            return st.integers(schema["minimum"], schema["maximum"])
        case "number":
            return st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
        case "null":
            return st.none()
    raise AssertionError(schema)


TEXT = st.characters(codec="utf-8")
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(TEXT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(TEXT), inner, max_size=3),
    max_leaves=5,
)
EVENTS_OF_THE_DOCUMENT = st.one_of(*(fitting(SCHEMAS[kind.__name__]) for kind in EVENTS.values()))
FEW_SESSIONS = st.sampled_from(["s", "t"])


@settings(max_examples=150, derandomize=True, deadline=None)
@given(event=EVENTS_OF_THE_DOCUMENT, session=st.none() | FEW_SESSIONS)
def test_whatever_it_allows_is_taken_and_answered_as_it_says(
    house: House, event: Any, session: str | None
) -> None:
    if session is not None and "session_id" in event:
        event["session_id"] = session  # else nearly all are about sessions that nobody knows
    reply = house.ask(event)
    status, answer = reply.status, check_answer(reply)
    if answer["ok"]:
        REPLIES[event["type"]].validate(answer)
    else:
        same_twice = event.get("child_session_id") == event.get("session_id")
        assert status in (404, 409) or (status == 400 and same_twice), (status, answer)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.one_of(
        ANY,
        st.fixed_dictionaries(
            {"type": st.sampled_from(sorted(EVENTS))},
            optional={"session_id": st.integers() | st.text(), "fork_id": st.text()},
        ),
    )
)
def test_whatever_it_does_not_allow_is_refused_as_it_says(house: House, body: Any) -> None:
    reply = house.ask(body)
    check_answer(reply)
    if isinstance(body, list):
        assert reply.status == 200  # each of them is answered on its own
    elif not REQUEST.is_valid(body):
        assert reply.status in (400, 413)


# Operators


def test_every_path_of_the_admin_listener_is_in_it_but_for_the_pages_files() -> None:
    gate = Gate(Bearer(""), is_unix=False)
    app = create_admin_app(Admin(trio.Event(), Problems()), gate)
    served = {
        (method.lower(), rule.rule)
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) & {"GET", "POST", "PUT", "DELETE"}
        if rule.rule not in ("/", "/static/<name>")
    }
    assert served == {(operation.method, operation.path) for operation in OPERATIONS}


ASKED = {"id": "s", "q": "h-a"}
SENT = {
    "/api/session/close": {"session_id": "s"},
    "/api/session/suspend": {"session_id": "s"},
    "/api/prefetching": {"paused": False},
}


async def test_operators_get_what_it_says(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        await ops.agent.turn_end("s", "h-a", "h-b")
        for operation in OPERATIONS:
            if isinstance(operation.answer, str):
                continue
            headers = {"X-Ramakv-Action": "1"} if operation.is_action else {}
            reply = await ops.http.request(
                operation.method,
                operation.path,
                params={operation.asks: ASKED[operation.asks]} if operation.asks else {},
                json=SENT.get(operation.path),
                headers=headers,
            )
            assert reply.status_code == 200, (operation, reply.text)
            described = DOCUMENT["paths"][operation.path][operation.method]
            validator(content_of(described["responses"]["200"])).validate(reply.json())
