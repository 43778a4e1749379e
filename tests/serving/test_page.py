"""The web page of the server, in a browser.

Chromium is driven by playwright; without one of them the tests are skipped. The page's
script without a browser: test_page_script.py.
"""

import os
import re
import shutil
import time

import pytest
from canned_server import ANSWER, HOSTILE, CannedServer

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser():
    # Chromium's sandbox needs another user than root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=arguments)
        yield started
        started.close()


@pytest.fixture
def open_page(browser):
    """A function that opens the page of a server, with a clock that the test moves
    where it says so. The page must log no error."""
    contexts, servers = [], []

    def open_page(*, api_key=None, width=1200, has_clock=False, **settings):
        servers.append(server := CannedServer(api_key))
        settings |= {"viewport": {"width": width, "height": 800}}
        contexts.append(browser.new_context(**settings))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: server.logged.append(str(error)))
        page.on("console", lambda message: server.logged.append(message.text))
        if has_clock:
            page.clock.install()
            page.clock.pause_at(time.time() + 10)
        page.goto(server.url)
        if api_key is None:
            page.wait_for_selector("#model option", state="attached")
        return page, server

    yield open_page
    for each in contexts:
        each.close()
    for each in servers:
        each.stop()
    # A refused request is an error for the console, and for the user.
    wrong = [text for server in servers for text in server.logged]
    assert not [text for text in wrong if not text.startswith("Failed to load")]


def open_real(browser, url):
    """The page of a real server."""
    page = browser.new_page()
    page.set_default_timeout(30_000)
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    return page


def ask(page, text="Hello"):
    page.fill("#input", text)
    page.press("#input", "Enter")


def answered(page, count=1):
    """Wait for the end of an answer."""
    selector = "#log article[aria-busy=false]"
    page.wait_for_selector(f":nth-match({selector}, {count})")


def test_chat(open_page):
    page, server = open_page()
    page.select_option("#model", "poet")
    assert page.inner_text("#model option:checked") == "poet (adapter of base)"
    page.fill("#system", "Be brief.")
    for name, value in (("temperature", "0.5"), ("max_tokens", "7"), ("seed", "3")):
        page.fill(f"#{name}", value)
    page.fill("#input", "One")
    page.press("#input", "Shift+Enter")
    page.type("#input", "line")
    page.press("#input", "Enter")
    answered(page)
    ask(page, "More")
    answered(page, 2)
    first, second = server.bodies
    system, user = ({"role": "system", "content": "Be brief."}, "One\nline")
    assert first["messages"] == [system, {"role": "user", "content": user}]
    text = "".join(text for name, text, _ in ANSWER if name == "content")
    assert [m["content"] for m in second["messages"]] == [
        *("Be brief.", user, text, "More")
    ]
    settings = {"model": "poet", "temperature": 0.5, "max_tokens": 7, "seed": 3}
    assert settings.items() <= first.items()
    page.click("#new")
    assert page.locator("#log > *").count() == 0
    ask(page, "Again")
    answered(page)
    assert [m["content"] for m in server.bodies[-1]["messages"]][1:] == ["Again"]


def test_answer_is_text_with_its_counts(open_page):
    page, _ = open_page()
    ask(page, HOSTILE)
    answered(page)
    article = page.locator("article")
    assert page.inner_text(".user") == HOSTILE
    assert article.locator("> .content").text_content() == f"{HOSTILE} two three end"
    details = article.locator("details")
    assert details.get_attribute("open") is None
    assert details.locator(".text").text_content() == "I count."
    assert page.locator("#log img, #log script").count() == 0
    assert page.title() == "lmx"
    note = article.locator(".note").inner_text()
    pattern = (
        r"5 tokens · [\d.]+ tokens/s · first token after [\d.]+ s · "
        r"2 accepted draft tokens · cut at the limit of tokens"
    )
    assert re.fullmatch(pattern, note)


MARKDOWN = """\
# Title

A **bold** word, `a < b`, [a link](https://example.org/), [a trap](javascript:alert(1)).
Next line.

- one
- two

| long | row |
|---|---|
| a_____________________________________________________________________________b | 1 |

```python
print("<b>")
```
"""


def test_markdown_is_shown_copied_and_made_again(open_page):
    page, server = open_page()
    server.answer = [("content", MARKDOWN[i : i + 9], 0) for i in range(0, 270, 9)]
    ask(page)
    answered(page)
    page.wait_for_selector(".markdown .code")
    shown = page.locator(".markdown")
    assert shown.locator("h1").inner_text() == "Title"
    assert shown.locator("li").all_inner_texts() == ["one", "two"]
    assert shown.locator("p code").inner_text() == "a < b"
    link = shown.locator("a")
    names = ("href", "target", "rel")
    assert [link.get_attribute(name) for name in names] == [
        *("https://example.org/", "_blank", "noopener noreferrer")
    ]
    assert "[a trap](javascript:alert(1)).\nNext" in shown.inner_text()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for button, text in (
        (".code button", 'print("<b>")\n'),
        (".row > .small", MARKDOWN),
    ):
        page.locator("article").locator(button).first.click()
        page.get_by_text("Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == text
        page.get_by_text("Copied").wait_for(state="detached")
    page.get_by_role("button", name="Again").click()
    page.wait_for_selector("article[aria-busy=true]")
    answered(page)
    assert page.locator("#log > *").count() == 2
    first, second = server.bodies
    assert first == second


def test_marks_of_draft_tokens(open_page):
    page, _ = open_page()
    page.check("#marks")
    ask(page)
    answered(page)
    assert page.locator("article .marked span").all_text_contents() == [" two three"]
    assert "2 accepted draft tokens (underlined)" in page.inner_text("article .note")


def test_chat_outlives_a_reload(open_page):
    page, server = open_page()
    server.answer = [("reasoning_content", "I think.", 0), ("content", MARKDOWN, 0)]
    page.select_option("#model", "poet")
    page.fill("#system", "Be brief.")
    page.check("#marks")
    ask(page, HOSTILE)
    answered(page)
    server.waits, server.answer = True, [("content", "Half", 0), ("content", "-", 0)]
    ask(page, "More")
    page.get_by_text("Half").wait_for()
    for _ in range(2):
        page.reload()
        page.wait_for_selector("#model option", state="attached")
    assert page.locator(".user").all_inner_texts() == [HOSTILE, "More"]
    page.wait_for_selector(".markdown .code")
    assert page.locator("details .text").text_content() == "I think."
    assert page.locator("article").nth(1).locator(".content").inner_text() == "Half"
    assert page.is_checked("#marks")
    server.waits = False
    ask(page, "Now")
    answered(page, 3)
    body = server.bodies[-1]
    assert body["model"] == "poet"
    contents = ["Be brief.", HOSTILE, MARKDOWN, "More", "Half", "Now"]
    assert [m["content"] for m in body["messages"]] == contents
    page.click("#new")
    page.reload()
    assert page.locator("#log > *").count() == 0
    assert page.input_value("#system") == "Be brief."
    # What is no chat of ours does no harm.
    page.evaluate("localStorage['lmx-chat'] = '[1'")
    page.reload()
    page.wait_for_selector("#model option", state="attached")


def test_injected_script_does_not_run(open_page):
    """The policy holds even where the page would make HTML of a text."""
    page, server = open_page()
    page.evaluate("html => document.querySelector('#log').innerHTML = html", HOSTILE)
    assert page.locator("#log img").count() == 1
    refused = page.evaluate(
        "() => fetch('https://example.org/').then(() => 'sent', () => 'refused')"
    )
    assert (page.title(), refused) == ("lmx", "refused")
    refusals = [text for text in server.logged if "Content Security Policy" in text]
    assert {"script-src", "img-src", "connect-src"} <= set(
        re.findall(r"\b\w+-src\b", " ".join(refusals))
    )
    server.logged.clear()


@pytest.mark.parametrize("by", ["Escape", "button"])
def test_stop_closes_the_connection(open_page, by):
    page, server = open_page()
    server.waits = True
    ask(page)
    page.get_by_text(" three").wait_for()
    assert page.is_hidden("#send")
    if by == "Escape":
        page.press("#input", "Escape")
    else:
        page.click("#stop")
    answered(page)
    assert server.gone.wait(10)
    assert page.locator("article .note").inner_text().endswith("stopped")
    server.waits = False
    ask(page, "Go on")
    answered(page, 2)
    # The model sees as much of its answer as the user.
    assert server.bodies[-1]["messages"][1]["content"] == f"{HOSTILE} two three"


def test_errors_in_words(open_page):
    page, server = open_page()
    server.refusal = (429, "256 completions run or wait", {"Retry-After": "1"})
    ask(page, "First")
    answered(page)
    bad = page.locator("article .bad")
    assert bad.inner_text() == "256 completions run or wait. Try again in 1 s."
    # The message can be sent again, and stands in the chat once.
    assert page.input_value("#input") == "First"
    page.press("#input", "Enter")
    answered(page, 2)
    assert len(server.bodies[-1]["messages"]) == 1
    server.is_cut = True
    ask(page, "Second")
    answered(page, 3)
    assert bad.nth(1).inner_text() == "The connection ended before the answer did."
    page.fill("#max_tokens", "0")
    ask(page, "Third")
    assert len(server.bodies) == 3
    page.fill("#max_tokens", "1")
    server.stop()
    page.press("#input", "Enter")
    answered(page, 4)
    assert "does not answer" in bad.nth(2).inner_text()
    # Said once.
    assert page.inner_text("#status") == "The answer failed."


def test_key_is_asked_for_and_forgotten(open_page):
    page, server = open_page(api_key="right")
    for key in ("wrong", "right"):
        page.wait_for_selector("#key_dialog[open]")
        assert page.is_visible("#key_error") == (key == "right")
        page.fill("#key", key)
        page.press("#key", "Enter")
    page.wait_for_selector("#model option", state="attached")
    ask(page)
    answered(page)
    assert len(server.bodies) == 1
    stored = page.evaluate("[Object.values(sessionStorage), {...localStorage}]")
    assert stored[0] == ["right"]
    assert "right" not in str(stored[1])
    assert page.evaluate("document.cookie") == ""


def test_real_server(browser, server):
    page = open_real(browser, server.url)
    page.fill("#max_tokens", "5")
    page.fill("#temperature", "0")
    ask(page)
    answered(page)
    [message] = server.chat("Hello", max_tokens=5, temperature=0)["choices"]
    kept = page.evaluate("JSON.parse(localStorage['lmx-chat']).turns.at(-1).content")
    assert kept == message["message"]["content"]
    assert page.locator("article .note").inner_text().startswith("5 tokens · ")
    page.fill("#max_tokens", "")
    page.fill("#system", "x" * 10)
    page.fill("#seed", "9007199254740993")
    page.press("#seed", "Enter")
    ask(page)
    assert page.locator("article").count() == 1, "the browser rounds this seed"
    page.context.close()


def test_metrics(open_page):
    page, server = open_page(has_clock=True)
    for polls in (2, 3):
        page.clock.run_for(2000)
        points = re.compile(rf"^\S+( \S+){{{polls - 1}}}$")
        playwright.expect(page.locator("polyline").first).to_have_attribute(
            "points", points
        )
    shown = dict(text.split("\n") for text in page.locator("figure").all_inner_texts())
    assert shown == {
        "Tokens per second": "50",
        "Running / waiting": "3 / 2",
        "Keys and values": "2.50 GB",
        "Prefix-cache hits": "50 %",
        "Accepted drafts": "–",
        "First token, p50": "0.05 s",
    }
    assert page.locator("polyline").count() == 6
    # A page that is not seen asks for nothing.
    hide = "Object.defineProperty(document, 'hidden', {get: () => true})"
    page.evaluate(hide)
    page.clock.run_for(10_000)
    page.wait_for_timeout(100)
    assert server.polls == 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_layout_and_contrast(open_page, width, scheme):
    page, server = open_page(width=width, color_scheme=scheme)
    server.answer = [("content", MARKDOWN + "y" * 500, 0)]
    ask(page, "x" * 500)
    answered(page)
    page.wait_for_selector(".markdown table")
    for name in ("settings", "server"):
        if page.get_attribute(f"#{name}", "open") is None:
            assert width < 960
            page.click(f"#{name} summary")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("#send").bounding_box()["y"] < 800
    names = page.evaluate(
        "() => [...document.querySelectorAll('input, select, textarea, button, svg')]"
        ".filter(e => !(e.labels?.length || e.ariaLabel || e.textContent.trim()))"
        ".map(e => e.outerHTML)"
    )
    assert not names
    for selector in (".user", "article > .content", ".note", ".small", "#send"):
        assert contrast(page.locator(selector).first) >= 4.5, selector


def contrast(locator):
    """WCAG's ratio of the text's colour and the nearest background."""
    colors = locator.evaluate(
        """element => {
          const color = getComputedStyle(element).color;
          let back = "rgba(0, 0, 0, 0)";
          for (; back === "rgba(0, 0, 0, 0)"; element = element.parentElement)
            back = getComputedStyle(element).backgroundColor;
          return [color, back];
        }"""
    )
    levels = sorted(map(luminance, colors))
    return (levels[1] + 0.05) / (levels[0] + 0.05)


def luminance(color):
    red, green, blue = (
        (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
        for c in (int(n) / 255 for n in re.findall(r"\d+", color)[:3])
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
