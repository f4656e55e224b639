"""The live page in a real browser: what it shows, and that it goes on showing it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.browser.stage import (
    Agents,
    Stage,
    Window,
    many_sessions,
    running_stage,
    turn_end,
    turn_start,
)
from tests.daemons import free_port

Look = Callable[..., Window]


def figure(page: Page, title: str) -> str:
    heading = page.get_by_role("heading", name=title, exact=True)
    return heading.locator("xpath=..").inner_text()


def table(page: Page, name: str) -> list[str]:
    rows = page.get_by_role("table", name=name, exact=True).locator("tbody tr")
    return [" ".join(text.split()) for text in rows.all_inner_texts()]


def loaded(page: Page) -> Page:
    expect(page.locator("#version")).not_to_be_empty()
    return page


# What it shows


def test_it_shows_who_is_there_and_what_they_share(stage: Stage, look: Look) -> None:
    stage.turn("alice", ["sys", "tools", "a1"])
    stage.turn("bob", ["sys", "tools", "b1", "b2"])
    stage.turn("carol", ["c1"])
    stage.send({"type": "session_suspend", "session_id": "carol"})
    stage.send(turn_start("bob"))
    page = loaded(look(stage).open())
    assert "1 in a turn · 1 paused · 1 suspended" in figure(page, "Sessions")
    assert "5 chunks" in figure(page, "Belongs in the hot tier")
    assert [row.split()[0] for row in table(page, "Latest sessions")] == ["bob", "carol", "alice"]
    assert table(page, "Who holds the most")[0].startswith("bob in a turn 4")
    assert table(page, "Most shared chunks") == ["2× 2 sys bob, alice"]
    assert any(row.startswith("turn_end") for row in table(page, "Events by type"))
    expect(page.get_by_text("It answers.")).to_be_visible()
    expect(page.locator("#phase")).to_have_text("running")


def test_it_follows_what_happens_without_a_reload(stage: Stage, look: Look) -> None:
    page = loaded(look(stage).open())
    expect(page.get_by_text("No session yet").first).to_be_visible()
    stage.turn("late", ["a", "b", "c"])
    row = (
        page.get_by_role("table", name="Latest sessions").get_by_role("row").filter(has_text="late")
    )
    expect(row).to_contain_text("3")
    stage.send({"type": "session_close", "session_id": "late"})
    expect(page.get_by_text("0 in a turn · 0 paused · 0 suspended")).to_be_visible()


def test_an_empty_daemon_says_what_there_is_not(stage: Stage, look: Look) -> None:
    page = loaded(look(stage).open())
    for text in (
        "No session yet",
        "No chunk is held twice",
        "None since the start.",
        "nothing is owed",
    ):
        expect(page.get_by_text(text).first).to_be_visible()


def test_ten_thousand_sessions_are_a_figure_and_short_lists(tmp_path: Path, look: Look) -> None:
    with running_stage(tmp_path, RAMAKV_BACKEND__KIND="noop") as stage:
        many_sessions(stage)
        began = time.monotonic()
        page = loaded(look(stage).open())
        assert time.monotonic() - began < 10
        assert "10,000" in figure(page, "Sessions")
        assert len(table(page, "Latest sessions")) == 12
        assert table(page, "Most shared chunks")[0].startswith("10,000× 24 3e8")
        assert page.locator("*").count() < 3000
        page.get_by_role("searchbox").fill("SESSION-0777")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Search: SESSION-0777")).to_be_visible()
        expect(page.get_by_role("table").locator("tbody tr")).to_have_count(10)


def test_without_lmcache_it_says_so_and_what_that_means(tmp_path: Path, look: Look) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with running_stage(tmp_path, RAMAKV_BACKEND__KIND="lmcache", RAMAKV_LMCACHE_URL=url) as stage:
        for number in range(8):
            stage.turn("s", [f"a{number}"], stored=False)
        page = loaded(look(stage).open())
        expect(page.locator("#trouble")).to_have_text(
            "LMCache does not answer: prefetches are skipped, and evictions wait"
        )
        expect(page.locator("#phase")).to_have_text("degraded")
        expect(page.get_by_role("table", name="Recent failures")).to_contain_text("does not answer")
        page = look(stage).open("#/session/s")
        expect(page.get_by_text("Where chunks lie is not known")).to_be_visible()


def test_a_session_page_says_where_each_chunk_lies(tmp_path: Path, look: Look) -> None:
    with running_stage(tmp_path, RAMAKV_EMBEDDED__HOT_CHUNKS_MAX="8") as stage:
        stage.turn("old", [f"o{n}" for n in range(6)])
        stage.turn("other", ["o0", *(f"x{n}" for n in range(5))])  # drives some of them out
        stage.send(
            turn_end("old", [*(f"o{n}" for n in range(6)), "lost"]),
            {"type": "session_fork", "session_id": "old"},
        )
        window = look(stage)
        page = window.open("#/session/old")
        strip = page.locator("svg.strip")
        expect(strip).to_have_attribute(
            "aria-label", "7 chunks, 3 hot, 3 on disk, 1 missing, 7 shared"
        )
        box = strip.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 65, box["y"] + 14)
        expect(page.locator(".read")).to_have_text("#7  lost  missing, held by 2")
        page.get_by_text("All chunks as a table").click()
        rows = table(page, "Chunk map")
        assert rows[0] == "1 o0 hot 3"
        assert rows[-1] == "7 lost missing 2"
        page.get_by_text("Turns as a table").click()
        assert len(table(page, "Turns over time")) == 2
        assert table(page, "Forks")[0].endswith("7")


def test_an_id_that_would_be_markup_or_turn_text_is_only_text(stage: Stage, look: Look) -> None:
    hostile = '<img src=x onerror="window.hurt=1">/../#?&\u202egnp.'
    stage.turn(hostile, ["<b>bold</b>", "';--\u200b"])
    stage.turn("second", ["<b>bold</b>"])
    page = loaded(look(stage).open())
    link = page.get_by_role("table", name="Latest sessions").get_by_role("link").nth(1)
    shown = hostile.replace("\u202e", "\\u{202e}")
    expect(link).to_have_text(shown)
    link.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(shown)
    page.get_by_text("All chunks as a table").click()
    assert [row.split()[1] for row in table(page, "Chunk map")] == ["<b>bold</b>", "';--\\u{200b}"]
    page.get_by_role("link", name="<b>bold</b>").click()
    expect(page.get_by_role("heading", name="Chunk <b>bold</b>")).to_be_visible()
    expect(page.get_by_role("table", name="Awake sessions that hold it")).to_contain_text("second")
    assert page.evaluate("window.hurt") is None


def test_a_search_finds_sessions_and_chunks_or_says_that_there_are_none(
    stage: Stage, look: Look
) -> None:
    stage.turn("agent-7", ["abc", "def"])
    page = loaded(look(stage).open())
    page.keyboard.press("/")
    page.keyboard.type("abc\n")
    expect(page.get_by_text("Held by 1, forks and sleeping sessions included.")).to_be_visible()
    page.get_by_role("searchbox").fill("nothing like it")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Neither a session nor a chunk")).to_be_visible()
    page.get_by_role("searchbox").fill("AGENT")
    page.keyboard.press("Enter")
    page.get_by_role("table").get_by_role("link", name="agent-7").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("agent-7")
    page.go_back()
    expect(page.get_by_role("heading", name="Search: AGENT")).to_be_visible()


# What it does when things change


def test_it_comes_back_when_the_daemon_does(stage: Stage, look: Look) -> None:
    stage.turn("s", ["a"])
    window = look(stage)
    page = loaded(window.open())
    stage.daemon.kill()
    expect(page.locator("#phase")).to_have_text("no connection")
    expect(page.get_by_role("status")).to_contain_text("connection to the daemon was lost")
    expect(page.get_by_role("table", name="Latest sessions")).to_contain_text("s")  # as it was
    stage.start()
    expect(page.locator("#phase")).to_have_text("running")
    stage.turn("t", ["b"])
    expect(page.get_by_role("table", name="Latest sessions")).to_contain_text("t")
    # The browser itself says in the console that it could not connect.
    window.complaints[:] = [text for text in window.complaints if "ERR_" not in text]


def test_a_page_that_is_held_stands_still(stage: Stage, look: Look) -> None:
    page = loaded(look(stage).open())
    page.get_by_role("button", name="Hold").click()
    stage.turn("s", ["a"])
    page.wait_for_timeout(2500)
    expect(page.get_by_text("No session yet").first).to_be_visible()
    page.get_by_role("button", name="Go on").click()
    expect(page.get_by_role("table", name="Latest sessions")).to_contain_text("s")


def test_a_table_that_somebody_points_at_keeps_its_rows_in_place(stage: Stage, look: Look) -> None:
    stage.turn("one", ["a"])
    page = loaded(look(stage).open())
    page.get_by_role("table", name="Latest sessions").get_by_role("link", name="one").hover()
    stage.turn("two", ["b"])
    page.wait_for_timeout(2500)
    assert [row.split()[0] for row in table(page, "Latest sessions")] == ["one"]
    page.mouse.move(5, 5)
    rows = page.get_by_role("table", name="Latest sessions").locator("tbody tr")
    expect(rows).to_have_count(2)


# Languages


def test_it_speaks_the_browsers_language_until_it_is_told_another(stage: Stage, look: Look) -> None:
    page = loaded(look(stage, locale="zh-CN").open())
    expect(page.get_by_role("heading", name="最近的会话")).to_be_visible()
    assert page.locator("html").get_attribute("lang") == "zh-CN"
    page.get_by_role("button", name="English").click()
    expect(page.get_by_role("heading", name="Latest sessions")).to_be_visible()
    page.reload()
    expect(page.get_by_role("heading", name="Latest sessions")).to_be_visible()
    assert page.locator("html").get_attribute("lang") == "en"


def test_both_languages_have_the_same_words(stage: Stage, look: Look) -> None:
    page = loaded(look(stage).open())
    source = (Path("ramakv/web/static") / "i18n.js").read_text()
    halves = source.split("const ZH = ")
    keys = [
        set(page.evaluate('(s) => [...s.matchAll(/"([\\w.?]+)":/g)].map((m) => m[1])', h))
        for h in halves[:2]
    ]
    assert keys[0] == keys[1]
    assert len(keys[0]) > 100


# The token


def test_with_a_token_the_page_asks_for_it_once(tmp_path: Path, look: Look) -> None:
    with running_stage(tmp_path, RAMAKV_AUTH_TOKEN="sesame-4711") as stage:
        stage.send(turn_end("secret-session", ["a"]))
        window = look(stage)
        page = window.open()
        dialog = page.get_by_role("dialog", name="Token needed")
        expect(dialog).to_be_visible()
        assert "secret-session" not in page.content()
        dialog.get_by_label("Token").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("That is not the token.")
        dialog.get_by_label("Token").fill("sesame-4711")
        page.keyboard.press("Enter")
        expect(page.get_by_role("table", name="Latest sessions")).to_contain_text("secret-session")
        page.reload()  # it is kept for the tab
        expect(page.get_by_role("table", name="Latest sessions")).to_contain_text("secret-session")
        page.get_by_role("link", name="secret-session").first.click()
        page.get_by_role("button", name="Suspend").click()
        page.get_by_role("dialog").get_by_role("button", name="Suspend").click()
        expect(page.locator(".title .state")).to_have_text("suspended")
        assert not [url for url in window.requests if "sesame" in url]
        # The browser itself says in the console that a request was answered 401.
        window.complaints[:] = [text for text in window.complaints if "401" not in text]


# Actions


def test_an_action_asks_first_and_a_no_changes_nothing(stage: Stage, look: Look) -> None:
    stage.turn("s", ["a", "b"])
    page = look(stage).open("#/session/s")
    page.get_by_role("button", name="Close").click()
    dialog = page.get_by_role("dialog", name="Close this session?")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    page.get_by_role("button", name="Close").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Close")).to_be_focused()
    assert stage.read("session", id="s")["session"]["state"] == "paused"


def test_actions_do_what_they_say_and_are_logged(stage: Stage, look: Look) -> None:
    stage.turn("s", ["a", "b"])
    page = look(stage).open("#/session/s")
    for action, state in (("Suspend", "suspended"), ("Close", "closed")):
        page.get_by_role("button", name=action).click()
        page.get_by_role("dialog").get_by_role("button", name=action).click()
        expect(page.locator("article")).to_contain_text(state)
    page.get_by_role("link", name="Overview").click()
    page.get_by_role("button", name="Pause prefetching").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause prefetching").click()
    expect(page.get_by_text("An operator has paused prefetching.").first).to_be_visible()
    page.get_by_role("button", name="Resume prefetching").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume prefetching").click()
    expect(page.get_by_role("button", name="Pause prefetching")).to_be_visible()
    log = stage.daemon.log.read_text()
    for action in ("session_suspend", "session_close", "pause prefetching", "resume prefetching"):
        assert f'"action": "{action}"' in log


def test_an_action_that_fails_says_why_and_can_be_tried_again(stage: Stage, look: Look) -> None:
    stage.turn("s", ["a"])
    window = look(stage)
    page = window.open("#/session/s")
    page.get_by_role("button", name="Suspend").wait_for()
    page.route(
        "**/api/session/suspend",
        lambda route: route.fulfill(status=503, json={"error": "the store is full"}),
    )
    page.get_by_role("button", name="Suspend").click()
    page.get_by_role("dialog").get_by_role("button", name="Suspend").click()
    expect(page.get_by_role("alert")).to_contain_text("the store is full")
    page.unroute("**/api/session/suspend")
    page.get_by_role("dialog").get_by_role("button", name="Suspend").click()
    expect(page.locator(".title .state")).to_have_text("suspended")
    window.complaints[:] = [text for text in window.complaints if "503" not in text]


def test_many_windows_show_the_same(stage: Stage, look: Look) -> None:
    agents = Agents(stage)
    agents.begin(("review",))
    pages = [loaded(look(stage).open()) for _ in range(4)]
    agents.work(3)
    for page in pages:
        expect(page.get_by_text("0 in a turn · 4 paused")).to_be_visible()
