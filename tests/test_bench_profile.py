"""The profile's reading of py-spy's samples."""

from __future__ import annotations

from bench.profile import layer_of, parse, show, summarize

RAW = """\
main (bench/counted_daemon.py:70);run (trio/_core/_run.py:2532);_answer (ramakv/web/event_app.py:1) 6
main (bench/counted_daemon.py:70);run (trio/_core/_run.py:2500);_answer (ramakv/web/event_app.py:2);decode_event (ramakv/codec.py:3) 3
main (bench/counted_daemon.py:70);run (trio/_core/_run.py:2532);get_events (trio/_core/_io_epoll.py:5) 1
"""  # noqa: E501


def test_samples_count_for_the_innermost_layer() -> None:
    profile = summarize(parse(RAW), top=5)
    assert profile.layers == [
        ("ramakv.web", 0.6),
        ("codec and msgspec", 0.3),
        ("trio: waiting for I/O", 0.1),
    ]


def test_lines_of_one_function_count_together() -> None:
    profile = summarize(parse(RAW), top=5)
    assert dict(profile.with_callees)["run (trio/_core/_run.py)"] == 1.0
    assert dict(profile.with_callees)["_answer (ramakv/web/event_app.py)"] == 0.9
    assert dict(profile.alone)["_answer (ramakv/web/event_app.py)"] == 0.6


def test_threads_that_wait_for_work_do_not_count() -> None:
    idle = "run (threading.py:1);WorkerThread._work (trio/_core/_thread_cache.py:9) 50\n"
    assert summarize(parse(RAW + idle), top=5) == summarize(parse(RAW), top=5)


def test_what_is_above_the_tasks_is_left_out() -> None:
    (stack, _), *_ = parse("main (a.py:1);unrolled_run (trio/_core/_run.py:2);f (b.py:3) 4\n")
    assert stack == ("unrolled_run (trio/_core/_run.py:2)", "f (b.py:3)")


def test_the_standard_library_counts_for_who_calls_it() -> None:
    stack = ("commit (ramakv/store/store.py:9)", "__exit__ (contextlib.py:1)")
    assert layer_of(stack) == "ramakv.store and SQLite"
    assert layer_of(("a (b.py:1)",)) == "other"


def test_nothing_sampled_is_no_error() -> None:
    assert "## health" in show("health", summarize([], top=5))
