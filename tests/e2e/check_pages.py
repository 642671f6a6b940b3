"""Checks the pages in a browser: `python check_pages.py CHROMIUM SERVER_URL ROUTER_URL REPORT [SCREENSHOTS]`.

Runs in an environment with Playwright. Prints "PASS" if no request failed, no script complained, the curves moved
under load, a request could be explained and the policy be changed; else what went wrong. With a folder, writes
screenshots in light and dark, wide and narrow.
"""

import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

SIZES = {"desktop": (1440, 1000), "phone": (390, 844)}
KEY = "the-admin-key"


class Watched:
    """A page of a browser, with all that went wrong on it."""

    def __init__(self, browser: Browser, name: str, scheme: str, troubles: list[str]) -> None:
        width, height = SIZES[name]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page: Page = context.new_page()
        self.page.on("console", lambda said: said.type in ("error", "warning") and troubles.append(said.text))
        self.page.on("pageerror", lambda error: troubles.append(str(error)))
        self.page.on("requestfailed", lambda asked: self._failed(asked, troubles))
        self.page.on("response", lambda got: got.status >= 400 and troubles.append(f"{got.status} {got.url}"))

    @staticmethod
    def _failed(asked, troubles):
        if "ERR_ABORTED" not in (asked.failure or ""):
            troubles.append(f"{asked.url}: {asked.failure}")


def is_within(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def until(page: Page, expression: str) -> None:
    """Wait until it is true; the page's policy forbids Playwright's own way, which makes code of text."""
    for _ in range(600):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"not within a minute: {expression}")


def give_key(page: Page, url: str) -> None:
    """The first visit is refused, and asks for the key."""
    page.goto(url)
    page.wait_for_selector("#keys[open]")
    page.fill("#key-admin", KEY)
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#live-text').textContent === 'live'")
    assert KEY not in page.url


def try_server_page(page: Page) -> None:
    still = page.evaluate("document.querySelector('#chart-tokens canvas').toDataURL()")
    for _ in range(3):
        page.fill("#chat-text", "Tell a long story of a yard. " * 3)
        page.keyboard.press("Enter")
        page.wait_for_selector("#rows .row", timeout=10_000)
        until(page, "!document.querySelector('#chat-send').disabled")
    assert page.evaluate("document.querySelector('#chart-tokens canvas').toDataURL()") != still, "the curve is stalled"
    assert page.locator(".message.assistant .text").last.inner_text().strip()
    assert "tok" in page.locator("#tiles").inner_text()
    page.locator(".message .told button").last.click()
    page.wait_for_selector("#request .timeline i")
    page.keyboard.press("Escape")
    page.select_option("#policy", "lpm")
    page.click("#policy-form button")
    until(page, "document.querySelector('#policy-now').textContent.includes('lpm')")
    until(page, "document.querySelectorAll('#prefixes tbody tr').length > 0")


def keyboard_reaches_the_chat(page: Page) -> None:
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") != "BODY"


def main() -> None:
    chromium, server, router, report, *folder = sys.argv[1:]
    troubles: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in SIZES:
            for scheme in ("light", "dark"):
                shown = Watched(browser, name, scheme, troubles)
                page = shown.page
                give_key(page, server)
                if scheme == "light":
                    try_server_page(page)
                    keyboard_reaches_the_chat(page)
                for place, wait in ((router, "#workers tbody tr"), (report, "[data-chart]"), (server, "#tiles")):
                    page.goto(place)
                    page.wait_for_selector(wait)
                    page.wait_for_timeout(1500)
                    assert is_within(page), f"{place} is wider than the {name}"
                    if folder:
                        kind = {router: "router", report: "report", server: "server"}[place]
                        page.screenshot(path=str(Path(folder[0]) / f"{kind}-{name}-{scheme}.png"), full_page=True)
        browser.close()
    # The first visit of each context is refused for want of a key.
    troubles = [one for one in troubles if "401" not in one]
    print("\n".join(troubles) or "PASS")


if __name__ == "__main__":
    main()
