"""For everybody: by keyboard, by screen reader, in the dark, on a narrow screen."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.stage import Agents, Stage, Window

Look = Callable[..., Window]


def faults(page: Page) -> list[str]:
    """What axe-core finds of WCAG 2.2 A and AA, and of good practice."""
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    found: Any = Axe().run(page, options={"runOnly": {"type": "tag", "values": tags}}).response
    return [
        f"{violation['id']}: {json.dumps([node['html'][:200] for node in violation['nodes']])}"
        for violation in found["violations"]
    ]


def loaded(page: Page) -> Page:
    expect(page.locator("#version")).not_to_be_empty()
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
def test_no_view_has_a_fault_that_axe_knows(
    stage: Stage, look: Look, scheme: str, locale: str
) -> None:
    agents = Agents(stage)
    agents.begin(("review", "build"))
    stage.send({"type": "session_fork", "session_id": "review-1"})
    page = loaded(look(stage, color_scheme=scheme, locale=locale).open())
    assert not faults(page)
    page.goto(f"{stage.url}#/session/review-1")
    page.locator("svg.strip path.cell").first.wait_for()
    for summary in page.locator("summary").all():
        summary.click()
    assert not faults(page)
    page.locator(".title button").first.click()
    page.get_by_role("dialog").wait_for()
    assert not faults(page)
    page.keyboard.press("Escape")
    page.goto(f"{stage.url}#/search/review")
    page.get_by_role("table").wait_for()
    assert not faults(page)


def test_the_keyboard_is_enough(stage: Stage, look: Look) -> None:
    stage.turn("s", ["a", "b"])
    page = loaded(look(stage).open())
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="s", exact=True).first).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    page.get_by_role("button", name="Suspend").wait_for()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Suspend")).to_be_focused()
    page.keyboard.press("Enter")
    no = page.get_by_role("button", name="Cancel")
    expect(no).to_be_focused()
    for _ in range(4):  # the focus stays in the dialog, or goes to the browser's own frame
        page.keyboard.press("Tab")
        inside = page.evaluate("document.activeElement.closest('main, header, footer') === null")
        assert inside
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Suspend")).to_be_focused()


def test_each_part_can_be_found_by_its_role_and_name(stage: Stage, look: Look) -> None:
    page = loaded(look(stage).open())
    for role in ("banner", "search", "main", "contentinfo"):
        expect(page.get_by_role(role)).to_have_count(1)
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    for name in (
        "Latest sessions",
        "Who holds the most",
        "Most shared chunks",
        "LMCache",
        "Recent failures",
    ):
        expect(page.get_by_role("region", name=name, exact=True)).to_have_count(1)
    for image in page.get_by_role("img").all():
        assert image.get_attribute("aria-label")


def test_what_changes_each_second_is_not_read_out(stage: Stage, look: Look) -> None:
    page = loaded(look(stage).open())
    live = page.locator("[aria-live], [role=status], [role=alert]")
    before = live.all_inner_texts()
    for number in range(3):
        stage.turn("s", [f"a{number}"])
        page.wait_for_timeout(1000)
    assert live.all_inner_texts() == before


@pytest.mark.parametrize("width", [320, 390, 768, 1920])
def test_no_width_makes_it_scroll_sideways(stage: Stage, look: Look, width: int) -> None:
    agents = Agents(stage)
    agents.begin(("review",))
    stage.turn("x" * 200, ["f" * 200, "f" * 199])
    page = loaded(look(stage, viewport={"width": width, "height": 800}).open())
    for fragment in ("#/", f"#/session/{'x' * 200}", f"#/search/{'f' * 200}"):
        page.goto(f"{stage.url}{fragment}")
        page.wait_for_timeout(500)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, fragment
