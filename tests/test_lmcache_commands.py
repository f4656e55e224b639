"""`ramakv lmcache` and `ramakv chunks`, as somebody types them, against ports that answer."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import click
import httpx
import pytest
import trio
from click.testing import CliRunner

from ramakv.cli import main
from ramakv.commands import lmcache_targets
from tests.daemons import Daemon, free_port, running_daemon

NO_ENGINE = "LMCache engine not configured."
OK = {"status": "success"}
DEAD = "http://127.0.0.1:9"


class Request(NamedTuple):
    what: str
    """Method and target."""
    body: Any = None


@dataclass
class StandIn:
    """One port of LMCache: answers by method and path, and notes what it was asked."""

    role: str
    url: str = ""
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        self.requests.append(Request(f"{method} {target}", json.loads(body) if body else None))
        status, value = self.answers.get(
            f"{method} {target.partition('?')[0]}", (404, {"detail": "Not Found"})
        )
        return status, value if isinstance(value, bytes) else json.dumps(value).encode()

    @property
    def asked(self) -> list[Request]:
        """What was asked beyond who it is."""
        own = ("GET /lmc_version", "GET /meta?names=role")
        return [request for request in self.requests if request.what not in own]


def open_server(stand_in: StandIn, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            stand_in.authorizations.append(self.headers.get("authorization"))
            status, content = stand_in.answer(self.command, self.path, body)
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = reply  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


@contextmanager
def serving(stand_in: StandIn, port: int = 0) -> Iterator[StandIn]:
    with open_server(stand_in, port) as server:
        stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield stand_in
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def serving_in_a_row(*stand_ins: StandIn, hung: bool = False) -> Iterator[tuple[StandIn, ...]]:
    """Serve them on ports that follow each other; the next refuses, or takes and is silent."""
    for _ in range(100):
        first = random.randrange(20000, 32000)
        with ExitStack() as stack:
            try:
                silent = stack.enter_context(socket.socket())
                silent.bind(("127.0.0.1", first + len(stand_ins)))
                for port, stand_in in enumerate(stand_ins, first):
                    stack.enter_context(serving(stand_in, port))
            except OSError:
                continue
            if hung:
                silent.listen()
            yield stand_ins
            return
    raise AssertionError("no free ports in a row")


def stand_in(role: str, **more: Any) -> StandIn:
    return StandIn(
        role,
        answers={
            "GET /lmc_version": (200, "0.4.4"),
            "GET /commit_id": (200, "g6fbec463e"),
            "GET /version": (200, "0.4.4-g6fbec463e"),
            "GET /meta": (200, {"role": role}),
        },
        **more,
    )


class Deployment(NamedTuple):
    scheduler: StandIn
    worker0: StandIn
    worker1: StandIn

    def set(self, what: str, value: Any, scheduler: tuple[int, Any] | None = None) -> None:
        for target in self:
            target.answers[what] = (200, value)
        if scheduler is not None:
            self.scheduler.answers[what] = scheduler

    @property
    def asked(self) -> list[list[Request]]:
        return [target.asked for target in self]


@pytest.fixture
def lmcache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    """A scheduler and two workers, where the commands look for them."""
    all_of_them = (stand_in("scheduler"), stand_in("worker"), stand_in("worker"))
    with serving_in_a_row(*all_of_them) as served:
        deployment = Deployment(*served)
        monkeypatch.setattr(lmcache_targets, "SCHEDULER_URL", deployment.scheduler.url)
        yield deployment


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(arguments), terminal_width=200)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def run_json(*arguments: str) -> tuple[int, Any]:
    code, out, err = run(*arguments, "--json")
    assert err == ""
    return code, json.loads(out)


class Case(NamedTuple):
    """A command, the request it makes of every target, and the answer."""

    command: str
    request: str
    answer: Any
    body: Any = None
    shown: str = "success"
    """A piece of the table."""
    out: Any = None
    """What --json prints for a target; None: the answer."""


FREEZE = OK | {"freeze": True, "message": "Freeze mode enabled successfully"}
HOT = OK | {"hot_cache": False, "message": "Hot cache is disabled"}
BYPASSED = OK | {
    "backend_name": "RemoteBackend", "bypassed": True, "was_already_bypassed": False,
    "bypassed_backends": ["RemoteBackend"],
}  # fmt: skip
SERVED = OK | {
    "backend_name": "RemoteBackend", "bypassed": False, "was_bypassed": True,
    "bypassed_backends": [],
}  # fmt: skip
CHECKED = OK | {
    "slot_mapping_ranges": [[0, 3], 9], "chunk_size": 2, "num_chunks": 2,
    "chunk_checksums": ["abc", "def"], "layerwise": False,
}  # fmt: skip
LAYERS = OK | {
    "num_layers": 1,
    "layers": {"layer_0": {"shape": [2, 128], "dtype": "torch.bfloat16", "device": "cuda:0"}},
}
LOADED = OK | {
    "loaded_chunks": 95, "total_files": 100, "failed_keys": ["key1"], "config_path": "/l.yaml",
}  # fmt: skip
STATISTICS = {"is_collecting": True, "total_chunks": 10, "unique_chunks": 5}

CASES = [
    Case("info", "GET /inference_info", {"vllm": {"model": "m"}}, shown='{"model": "m"}'),
    Case("inference-version", "GET /inference_version", {"vllm_version": "0.8.0"}, shown="0.8.0"),
    Case("conf get", "GET /conf", {"chunk_size": 256, "remote_url": None}, shown="null"),
    Case("conf get a b", "GET /conf?names=a,b", {"a": True}, shown="true"),
    Case(
        "conf set a=512 b=true c=text d=NaN e=-1.5 f=x=y g=", "POST /conf",
        {"updated": {"a": 512}},
        {"a": 512, "b": True, "c": "text", "d": "NaN", "e": -1.5, "f": "x=y", "g": ""},
        shown='{"a": 512}',
    ),
    Case("meta", "GET /meta", {"role": "worker", "new": [1]}, shown="[1]"),
    Case("meta worker_id x", "GET /meta?names=worker_id,x", {"worker_id": 3}, shown="worker_id"),
    Case("cache clear --yes", "DELETE /cache/clear", OK | {"num_removed": 1024}, shown="1024"),
    Case(
        "cache clear --yes --location A --location B",
        "DELETE /cache/clear?locations=A&locations=B", OK | {"num_removed": 0},
    ),
    Case("cache store 0 100", "POST /cache/store?tokens_mock=0,100", OK | {"num_tokens": 100}),
    Case(
        "cache retrieve 0 100", "POST /cache/retrieve?tokens_mock=0,100",
        OK | {"num_tokens": 100, "num_retrieved": 80}, shown="80",
    ),
    Case(
        "kvcache check 0,1,[2,3] --chunk-size 2",
        "GET /cache/kvcache/check?slot_mapping=0,1,[2,3]&chunk_size=2", CHECKED, shown="abc, def",
    ),
    Case(
        "kvcache check 0 --chunk-size 1 --layerwise",
        "GET /cache/kvcache/check?slot_mapping=0&chunk_size=1&layerwise=true",
        CHECKED | {"layerwise": True, "chunk_checksums": {"layer_0": ["abc"]}}, shown="layer_0",
    ),
    Case(
        "kvcache record-slot", "POST /cache/kvcache/record_slot",
        OK | {"kvcache_check_log_enabled": False}, shown="false",
    ),
    Case(
        "kvcache record-slot on", "POST /cache/kvcache/record_slot?enabled=true",
        OK | {"kvcache_check_log_enabled": True},
    ),
    Case(
        "kvcache record-slot off", "POST /cache/kvcache/record_slot?enabled=false",
        OK | {"kvcache_check_log_enabled": False},
    ),
    Case("kvcache info", "GET /cache/kvcache/info", LAYERS, shown="torch.bfloat16"),
    Case(
        "load-fs-chunks /l.yaml", "POST /cache/load-fs-chunks", LOADED,
        {"config_path": "/l.yaml"}, shown="key1",
    ),
    Case(
        "load-fs-chunks /l.yaml --max-chunks 9 --max-failed-keys 0", "POST /cache/load-fs-chunks",
        LOADED, {"config_path": "/l.yaml", "max_chunks": 9, "max_failed_keys": 0},
    ),
    Case("freeze enable", "PUT /freeze/enable", FREEZE, shown="enabled successfully"),
    Case("freeze disable", "PUT /freeze/disable", FREEZE),
    Case("freeze status", "GET /freeze/status", FREEZE),
    Case("hot-cache enable", "PUT /hot_cache/enable", HOT),
    Case("hot-cache disable", "PUT /hot_cache/disable", HOT),
    Case("hot-cache status", "GET /hot_cache/status", HOT, shown="Hot cache is disabled"),
    Case(
        "lookup info", "GET /lookup/info", {"client": "None", "server": "LMCacheLookupServer"},
        shown="LMCacheLookupServer",
    ),
    Case("lookup close --yes", "POST /lookup/close", {"old": "X", "role": "worker"}, shown="X",
         out={"old": "X", "dryrun": False, "role": "worker"}),
    Case("lookup create --yes", "POST /lookup/create", {"new": "X", "role": "worker"}, shown="X",
         out={"new": "X", "dryrun": False, "role": "worker"}),
    Case("lookup create --dryrun --yes", "POST /lookup/create?dryrun=true",
         {"new": "X", "dryrun": True}, shown="true"),
    Case("lookup recreate --yes", "POST /lookup/recreate", {"old": "X", "new": "Y"}, shown="Y",
         out={"old": "X", "new": "Y", "dryrun": False}),
    Case("stats start", "POST /chunk_statistics/start", OK | {"message": "Started"}),
    Case("stats stop", "POST /chunk_statistics/stop", OK | {"message": "Stopped"}),
    Case("stats reset", "POST /chunk_statistics/reset", OK | {"message": "Reset"}, shown="Reset"),
    Case("stats status", "GET /chunk_statistics/status", STATISTICS, shown="unique_chunks"),
    Case("bypass list", "GET /bypass/list",
         OK | {"bypassed_backends": [], "all_backends": ["A", "B"]}, shown="A, B"),
    Case("bypass add RemoteBackend", "PUT /bypass/add?backend_name=RemoteBackend", BYPASSED),
    Case("bypass remove RemoteBackend", "PUT /bypass/remove?backend_name=RemoteBackend", SERVED,
         shown="none"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.command)
def test_each_command_asks_every_target_and_shows_what_each_said(
    case: Case, lmcache: Deployment
) -> None:
    lmcache.set(case.request.partition("?")[0], case.answer)
    code, out, err = run("lmcache", *case.command.split())
    assert (code, err) == (0, "")
    assert case.shown in out
    for target in lmcache:
        assert target.url in out
    code, printed = run_json("lmcache", *case.command.split())
    assert code == 0
    assert list(printed) == [target.url for target in lmcache], "in the order of the ports"
    assert list(printed.values()) == [case.out or case.answer] * 3
    assert lmcache.asked == [[Request(case.request, case.body)] * 2] * 3


def test_version_asks_for_each_form_of_it(lmcache: Deployment) -> None:
    expected = {
        "version": "0.4.4-g6fbec463e",
        "lmc_version": "0.4.4",
        "commit_id": "g6fbec463e",
    }
    code, printed = run_json("lmcache", "version")
    assert (code, list(printed.values())) == (0, [expected] * 3)


def test_metrics_are_lmcaches_own(lmcache: Deployment) -> None:
    counted = 'lmcache:hits_total{model="a b"}'
    text = f"# TYPE lmcache:hits_total counter\n{counted} 3.0\nlmcache:usage NaN\npython_info 1.0\n"
    lmcache.set("GET /metrics", text.encode())
    code, printed = run_json("lmcache", "metrics")
    assert code == 0
    assert list(printed.values()) == [{counted: "3.0", "lmcache:usage": "NaN"}] * 3
    code, out, err = run("lmcache", "metrics")
    assert (code, err) == (0, "")
    assert counted in out


def test_a_few_fields_are_columns_and_many_are_rows(lmcache: Deployment) -> None:
    lmcache.set("GET /conf", {"a": 1, "b": [1, {"c": "d"}]})
    lines = run("lmcache", "conf", "get")[1].splitlines()
    assert [line.split() for line in lines if "http" in line] == [
        [target.url, "1", "[1,", '{"c":', '"d"}]'] for target in lmcache
    ]
    lmcache.set("GET /conf", {f"name{n}": n for n in range(90)})
    lines = run("lmcache", "conf", "get")[1].splitlines()
    assert [line.split() for line in lines if "http" in line] == [[t.url for t in lmcache]]
    assert ["name42", "42", "42", "42"] in [line.split() for line in lines]


def test_what_a_target_says_does_not_reach_the_terminal_raw(lmcache: Deployment) -> None:
    lmcache.set("GET /conf", {"a": "\x1b[2Jgone", "[red]b": "[bold]x", "c": "x" * 1000})
    out = run("lmcache", "conf", "get")[1]
    assert "\x1b" not in out
    assert r'"\u001b[2Jgone"' in out
    assert "[bold]x" in out
    assert "[red]b" in out
    assert "x" * 299 + "…" in out


# --- targets ---


def test_workers_are_found_up_to_the_first_port_that_refuses(lmcache: Deployment) -> None:
    lmcache.set("GET /lookup/info", {"client": "a", "server": "b"})
    assert len(run_json("lmcache", "lookup", "info")[1]) == 3
    assert [[r.what for r in t.requests] for t in lmcache] == [
        ["GET /lookup/info"],
        ["GET /lmc_version", "GET /lookup/info"],
        ["GET /lmc_version", "GET /lookup/info"],
    ]


@pytest.mark.parametrize("answer", [(404, {"detail": "Not Found"}), (200, b"<html>"), (405, "")])
def test_what_is_no_lmcache_is_no_worker(answer: tuple[int, Any], lmcache: Deployment) -> None:
    lmcache.set("GET /lookup/info", {"client": "a", "server": "b"})
    lmcache.worker0.answers["GET /lmc_version"] = answer
    assert list(run_json("lmcache", "lookup", "info")[1]) == [lmcache.scheduler.url]
    assert lmcache.asked[1:] == [[], []]


def test_a_worker_that_hangs_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_in_a_row(stand_in("scheduler"), hung=True) as (scheduler,):
        scheduler.answers["GET /lookup/info"] = (200, {"client": "a", "server": "b"})
        monkeypatch.setattr(lmcache_targets, "SCHEDULER_URL", scheduler.url)
        code, printed = run_json("lmcache", "lookup", "info", "--timeout", "0.3")
    assert code == 1
    assert printed.pop(scheduler.url) == {"client": "a", "server": "b"}
    (hung,) = printed.values()
    assert hung["status"] is None
    assert "no answer" in hung["error"]


def test_given_urls_are_asked_and_no_others(lmcache: Deployment) -> None:
    lmcache.set("GET /lookup/info", {"client": "a", "server": "b"})
    given = (lmcache.worker1.url, lmcache.scheduler.url + "/", lmcache.worker1.url)
    code, printed = run_json("lmcache", "lookup", "info", *(f"--url={url}" for url in given))
    assert code == 0
    assert list(printed) == [lmcache.worker1.url, lmcache.scheduler.url]
    assert lmcache.worker0.requests == []


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6999",
        "https://a:1",
        "http://",
        "http://a:x",
        "unix:/a",
        "http://a:99999",
        "http://[::1",
        "",
    ],
)
def test_a_url_that_cannot_be_used_is_bad_usage(url: str) -> None:
    code, out, err = run("lmcache", "version", "--url", url)
    assert (code, out) == (2, "")
    assert "expected http://host:port" in err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "x"])
def test_a_timeout_is_a_number_of_seconds(seconds: str) -> None:
    assert run("lmcache", "version", "--timeout", seconds)[0] == 2


# --- what fails ---


def test_one_that_is_down_does_not_hide_the_others(lmcache: Deployment) -> None:
    lmcache.set("GET /freeze/status", FREEZE)
    urls = (f"--url={url}" for url in (lmcache.worker0.url, DEAD, lmcache.worker1.url))
    command = ("lmcache", "freeze", "status", *urls)
    code, printed = run_json(*command)
    assert code == 1
    assert printed[lmcache.worker0.url] == printed[lmcache.worker1.url] == FREEZE
    assert printed[DEAD]["status"] is None
    assert "/freeze/status: " in printed[DEAD]["error"]
    code, out, _ = run(*command)
    assert code == 1
    assert DEAD in out
    assert out.count("Freeze mode enabled") == 2
    assert "error" in out


def test_nothing_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_targets, "SCHEDULER_URL", f"http://127.0.0.1:{free_port()}")
    code, out, _ = run("lmcache", "version")
    assert code == 1
    assert "/version: " in out


UNAVAILABLE = [
    ("freeze status", (503, {"error": "/freeze/status API is unavailable", "message": NO_ENGINE})),
    ("freeze status", (404, {"detail": "Not Found"})),
    ("kvcache info", (404, {"error": "kv_caches not available", "message": "is empty"})),
    (
        "kvcache record-slot on",
        (500, {
            "error": "Failed to set record slot status",
            "message": "'NoneType' object has no attribute 'kvcache_check_log_enabled'",
        }),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("command", "answer"), UNAVAILABLE)
def test_a_scheduler_that_has_no_such_thing_is_no_failure(
    command: str, answer: tuple[int, Any], lmcache: Deployment
) -> None:
    case = next(case for case in CASES if case.command == command)
    lmcache.set(case.request.partition("?")[0], case.answer, scheduler=answer)
    code, printed = run_json("lmcache", *command.split())
    assert code == 0
    assert printed[lmcache.scheduler.url]["status"] == answer[0]
    assert printed[lmcache.worker0.url] == printed[lmcache.worker1.url] == case.answer
    url = f"--url={lmcache.scheduler.url}"
    assert run("lmcache", *command.split(), url)[0] == 1, "if there is no other"


@pytest.mark.parametrize(
    "answer",
    [
        (503, {"error": "too many connections"}),
        (500, {"error": "Failed to get freeze status", "message": "x"}),
        (400, {"error": "bad"}),
        (200, b"no JSON"),
        (200, {"status": "success"}),
    ],
)
def test_any_other_answer_is_a_failure(answer: tuple[int, Any], lmcache: Deployment) -> None:
    lmcache.set("GET /freeze/status", FREEZE, scheduler=answer)
    code, printed = run_json("lmcache", "freeze", "status")
    assert code == 1
    assert printed[lmcache.scheduler.url]["error"]
    assert printed[lmcache.scheduler.url]["status"] == answer[0]
    assert printed[lmcache.worker0.url] == FREEZE


@pytest.mark.parametrize("status", [200, 400])
def test_a_setting_that_was_not_changed_is_a_failure(status: int, lmcache: Deployment) -> None:
    answer = {"updated": {}, "errors": {"nope": "Unknown config"}}
    lmcache.set("POST /conf", {"updated": {"nope": 1}}, scheduler=(status, answer))
    code, printed = run_json("lmcache", "conf", "set", "nope=1")
    assert code == 1
    assert printed[lmcache.scheduler.url] == {"errors": {"nope": "Unknown config"}}
    assert printed[lmcache.worker0.url] == {"updated": {"nope": 1}}


@pytest.mark.parametrize(
    "command",
    [
        "conf set", "conf set a", "conf set =1", "cache store 1", "cache store -1 2",
        "kvcache check 0", "kvcache check 0 --chunk-size 0", "kvcache record-slot maybe",
        "freeze", "freeze melt", "lookup info --dryrun", "bypass add", "prefetch", "evict",
        "query", "query --jsno", "evict a --locaton LocalCPUBackend", "query -", "nope",
    ],
)  # fmt: skip
def test_bad_usage_sends_nothing(command: str, lmcache: Deployment) -> None:
    code, out, err = run("lmcache", *command.split())
    assert (code, out) == (2, "")
    assert "Error: " in err or "Usage: " in err
    assert all(target.requests == [] for target in lmcache)


# --- what is dangerous ---


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("lookup close", "aborts at close"),
        ("lookup create", "aborts at close and at create"),
        ("lookup create --dryrun", "a dry run hung its port"),
        ("lookup recreate", "not for a live engine"),
        ("conf set x=1 chunk_size=512", "chunk hashes depend on it"),
        ("cache clear", "must be computed again"),
        ("cache clear --location LocalCPUBackend", "must be computed again"),
        ("evict a b", "copies on remote tiers"),
    ],
)
def test_the_dangerous_is_not_sent_without_yes(command: str, why: str, lmcache: Deployment) -> None:
    for more in ((), ("--json",), ("--url", lmcache.scheduler.url)):
        code, out, err = run("lmcache", *command.split(), *more)
        assert (code, out) == (2, "")
        assert why in " ".join(err.split())
        assert err.endswith("ramakv: nothing was sent; --yes sends it\n")
        assert len(err.splitlines()) <= 4
    assert all(target.requests == [] for target in lmcache)


def test_chunk_size_can_be_set_with_yes(lmcache: Deployment) -> None:
    lmcache.set("POST /conf", {"updated": {"chunk_size": 512}})
    assert run("lmcache", "conf", "set", "chunk_size=512", "--yes")[0] == 0
    assert lmcache.asked == [[Request("POST /conf", {"chunk_size": 512})]] * 3


# --- /memory/* ---

PREFETCHED = {"status": "prefetch_started", "lookup_id": "id", "num_chunks": 2}
EVICTED = OK | {"num_evicted": 4}
MEMORY = [
    Case("prefetch a -2a6a --lookup-id id", "POST /memory/prefetch", PREFETCHED,
         {"chunk_hashes": ["a", "-2a6a"], "lookup_id": "id"}, shown="prefetch_started"),
    Case("prefetch a a", "POST /memory/prefetch", PREFETCHED, {"chunk_hashes": ["a"]}, shown="id"),
    Case("evict -af2f b -af2f --location LocalCPUBackend --location B", "POST /memory/evict",
         EVICTED, {"chunk_hashes": ["-af2f", "b"], "locations": ["LocalCPUBackend", "B"]}),
    Case("evict a --yes", "POST /memory/evict", EVICTED, {"chunk_hashes": ["a"]}, shown="4"),
    Case("query -b -a", "POST /memory/query", {"-b": ["LocalCPUBackend"], "-a": []},
         {"chunk_hashes": ["-b", "-a"]}, shown="LocalCPUBackend"),
]  # fmt: skip


@pytest.mark.parametrize("case", MEMORY, ids=lambda case: case.command)
def test_memory_calls_go_to_the_scheduler_alone(case: Case, lmcache: Deployment) -> None:
    lmcache.set(case.request, case.answer)
    command = case.command.split()
    code, printed = run_json("lmcache", *command)
    assert (code, printed) == (0, {lmcache.scheduler.url: case.answer})
    (request,) = lmcache.scheduler.asked
    assert request.what == case.request
    assert {name: request.body[name] for name in case.body} == case.body
    assert lmcache.asked[1:] == [[], []]
    code, out, _ = run("lmcache", *command)
    assert code == 0
    assert case.shown in out


def test_hashes_may_follow_two_dashes(lmcache: Deployment) -> None:
    lmcache.set("POST /memory/query", {"-a": []})
    assert run("lmcache", "query", "--", "-a")[0] == 0
    assert lmcache.scheduler.asked[0].body == {"chunk_hashes": ["-a"]}


def test_each_prefetch_has_an_id_of_its_own(lmcache: Deployment) -> None:
    lmcache.set("POST /memory/prefetch", PREFETCHED)
    for _ in range(2):
        assert run("lmcache", "prefetch", "a")[0] == 0
    ids = [request.body["lookup_id"] for request in lmcache.scheduler.asked]
    assert len(set(ids)) == 2


def test_workers_that_failed_are_named(lmcache: Deployment) -> None:
    failures = {"7001": {"error": "timed out"}}
    answer = (500, {"error": "Some workers failed to process request", "failures": failures})
    lmcache.scheduler.answers["POST /memory/evict"] = answer
    code, printed = run_json("lmcache", "evict", "a", "--location", "LocalCPUBackend")
    assert code == 1
    (report,) = printed.values()
    assert report["failures"] == {"7001": "timed out"}
    assert report["status"] == 500


@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize(
    "command", ["prefetch a", "evict a --location L", "evict a --yes", "query a"]
)
def test_one_process_is_sent_no_memory_calls(command: str, asked: int) -> None:
    with serving_in_a_row(stand_in("scheduler"), stand_in("scheduler")) as both:
        code, out, _ = run("lmcache", *command.split(), "--url", both[asked].url)
    assert code == 1
    assert "both answer as scheduler, so they are one process" in out
    assert [target.asked for target in both] == [[], []]


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_a_worker_can_be_asked_itself(asked: int) -> None:
    answers: dict[str, tuple[int, Any]] = {"POST /memory/query": (200, {"a": []})}
    ports = (stand_in("worker"), stand_in("worker"), stand_in("scheduler"))
    with serving_in_a_row(*ports) as served:
        served[asked].answers.update(answers)
        code, printed = run_json("lmcache", "query", "a", "--url", served[asked].url)
    assert (code, list(printed.values())) == (0, [{"a": []}])


def test_a_port_beside_that_does_not_say_its_role_stops_a_memory_call() -> None:
    for role, expected in (("scheduler", 1), ("worker", 0)):
        with serving_in_a_row(stand_in(role), hung=True) as (asked,):
            asked.answers["POST /memory/query"] = (200, {"a": []})
            code, out, _ = run("lmcache", "query", "a", "--timeout", "0.3", "--url", asked.url)
        assert code == expected
        assert ("does not say its role" in out) == bool(expected)
        assert len(asked.asked) == 1 - expected


@pytest.mark.parametrize("answer", [(404, {"detail": "Not Found"}), (200, b"x"), (200, {})])
def test_a_target_that_does_not_know_its_role_is_asked(
    answer: tuple[int, Any], lmcache: Deployment
) -> None:
    lmcache.set("POST /memory/query", {"a": []})
    for target in lmcache[:2]:
        target.answers["GET /meta"] = answer
    assert run("lmcache", "query", "a")[0] == 0


def test_a_memory_call_to_nobody_is_an_error() -> None:
    code, printed = run_json("lmcache", "query", "a", "--url", DEAD)
    assert code == 1
    assert printed[DEAD]["status"] is None


# --- chunks ---


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon and its embedded engine; one chunk is hot, one on disk, one nowhere."""
    with running_daemon(tmp_path_factory.mktemp("daemon")) as running:
        engine = f"http://127.0.0.1:{running.engine_port}"
        post(f"{engine}/engine/store", chunk_hashes=["h-a", "h-b"])
        running.turn_end("s", "h-a", "h-b", "h-c")
        post(f"{engine}/memory/evict", chunk_hashes=["h-b"], locations=["LocalCPUBackend"])
        running.turn_end("asleep", "h-z")
        running.send("session_suspend", "asleep")
        yield running


def post(url: str, **body: Any) -> Any:
    reply = httpx.post(url, json=body, trust_env=False, verify=False)
    reply.raise_for_status()
    return reply.json()


def run_chunks(daemon: Daemon, session: str, *more: str, engine: str = "") -> tuple[int, str, str]:
    engine = engine or f"http://127.0.0.1:{daemon.engine_port}"
    return run("chunks", session, "--url", daemon.url, "--engine-url", engine, *more)


def test_chunks_shows_where_each_lies(daemon: Daemon) -> None:
    code, out, err = run_chunks(daemon, "s")
    assert (code, err) == (0, "")
    hot, disk, nowhere, summary = out.splitlines()
    assert hot.split()[:2] == ["1", "h-a"]
    assert "hot" in hot
    assert disk.split() == ["2", "h-b", "on", "disk"]
    assert nowhere.split() == ["3", "h-c", "nowhere"]
    assert summary == "3 chunks: 1 hot, 1 on disk, 1 nowhere"


def test_chunks_as_json(daemon: Daemon) -> None:
    code, out, _ = run_chunks(daemon, "s", "--json")
    report = json.loads(out)
    assert (code, report["session_id"]) == (0, "s")
    assert [chunk["chunk_hash"] for chunk in report["chunks"]] == ["h-a", "h-b", "h-c"]
    assert "LocalCPUBackend" in report["chunks"][0]["locations"]
    assert [chunk["locations"] for chunk in report["chunks"][1:]] == [["LocalDiskBackend"], []]
    assert report["summary"] == {"hot": 1, "disk": 1, "elsewhere": 0, "nowhere": 1}


def test_chunks_of_a_session_without_a_map(daemon: Daemon) -> None:
    assert run_chunks(daemon, "x") == (1, "", "ramakv: session 'x' not found\n")
    code, out, err = run_chunks(daemon, "asleep")
    assert (code, out) == (1, "")
    assert err == f"ramakv: {daemon.send('session_map', 'asleep')['error']}\n"


def test_chunks_where_lmcache_cannot_tell(daemon: Daemon) -> None:
    with serving(stand_in("worker")) as real:
        code, out, err = run_chunks(daemon, "s", engine=real.url)
        assert (code, err) == (0, "")
        assert out.splitlines()[0].split() == ["1", "h-a", "cannot", "tell"]
        assert out.endswith("3 chunks; cannot tell where they lie\n")
        code, out, _ = run_chunks(daemon, "s", "--json", engine=real.url)
    report = json.loads(out)
    assert (code, report["summary"]) == (0, None)
    assert report["chunks"][0] == {"chunk_hash": "h-a", "locations": None}


def test_chunks_on_other_tiers_are_elsewhere(daemon: Daemon) -> None:
    with serving(stand_in("worker")) as real:
        held = {"h-a": ["RemoteBackend"], "h-b": ["LocalDiskBackend", "LocalCPUBackend"]}
        real.answers["POST /memory/query"] = (200, held)
        code, out, _ = run_chunks(daemon, "s", engine=real.url)
    assert code == 0
    first, second, *_, summary = out.splitlines()
    assert first.endswith("  RemoteBackend")
    assert second.endswith("  on disk, hot")
    assert summary == "3 chunks: 1 hot, 0 on disk, 1 elsewhere, 1 nowhere"


def test_chunks_without_an_engine_are_still_listed(daemon: Daemon) -> None:
    code, out, err = run_chunks(daemon, "s", engine=DEAD)
    assert code == 1
    assert err.startswith(f"ramakv: {DEAD}: ")
    assert err.count("\n") == 1
    assert out.count("cannot tell") == 4


def test_chunks_are_not_asked_of_one_process(daemon: Daemon) -> None:
    with serving_in_a_row(stand_in("scheduler"), stand_in("scheduler")) as both:
        code, _, err = run_chunks(daemon, "s", engine=both[0].url)
    assert code == 1
    assert "both answer as scheduler" in err
    assert both[0].asked == []


def test_chunks_without_a_daemon_is_one_line() -> None:
    code, out, err = run("chunks", "s", "--url", DEAD)
    assert (code, out) == (1, "")
    assert err.startswith(f"ramakv: no answer from {DEAD}")
    with serving(stand_in("worker")) as other:
        other.answers["POST /event"] = (200, b"<html>")
        code, out, err = run("chunks", "s", "--url", other.url)
    assert (code, out) == (1, "")
    assert "does not answer as the daemon does" in err


def test_the_token_is_sent_to_the_daemon_alone() -> None:
    with serving(stand_in("worker")) as daemon, serving(stand_in("worker")) as real:
        data = {"session_id": "s", "chunk_hashes": ["a"]}
        daemon.answers["POST /event"] = (200, {"ok": True, "type": "session_map", "data": data})
        real.answers["POST /memory/query"] = (200, {"a": []})
        urls = ("--url", daemon.url, "--engine-url", real.url)
        assert run("chunks", "s", "--token", "sesame", *urls)[0] == 0
        assert run("chunks", "s", *urls)[0] == 0
    assert daemon.authorizations == ["Bearer sesame", None]
    assert set(real.authorizations) == {None}


def test_a_session_without_chunks_is_not_asked_for() -> None:
    with serving(stand_in("worker")) as daemon:
        data = {"session_id": "s", "chunk_hashes": []}
        daemon.answers["POST /event"] = (200, {"ok": True, "type": "session_map", "data": data})
        code, out, _ = run("chunks", "s", "--url", daemon.url, "--engine-url", DEAD)
    assert (code, out) == (0, "0 chunks: 0 hot, 0 on disk, 0 nowhere\n")


# --- the rest ---


def test_ctrl_c_among_the_calls_is_click_s_abort() -> None:
    async def interrupted() -> None:
        raise KeyboardInterrupt

    async def main_task() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(interrupted)

    with pytest.raises(click.Abort):
        lmcache_targets.run_trio(main_task)


def test_a_number_too_large_for_json_s_readers_does_not_crash(lmcache: Deployment) -> None:
    lmcache.set("POST /conf", {"updated": {"a": 1}})
    assert run("lmcache", "conf", "set", "a=" + "9" * 40)[0] == 0


def leaves() -> list[str]:
    group = main.commands["lmcache"]
    assert isinstance(group, click.Group)
    return [
        f"{name} {inner}".strip()
        for name, command in group.commands.items()
        for inner in getattr(command, "commands", [""])
        if name != "serve"  # it runs an engine, and asks none
    ]


@pytest.mark.parametrize("command", ["", *leaves()])
def test_every_command_explains_itself(command: str) -> None:
    code, out, _ = run("lmcache", *command.split(), "-h")
    assert code == 0
    assert "Usage:" in out
    if command:
        for option in ("--url", "--json", "--timeout", "-h, --help"):
            assert option in out


def test_the_command_line_starts_without_the_client() -> None:
    code = (
        "import sys; from ramakv import cli; "
        "print(sorted({'httpx', 'trio', 'rich', 'msgspec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
