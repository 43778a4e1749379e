"""The web page of the server, in a browser.

A server of the test sends canned answers, so that each token, error and end of a
connection comes when the test says so. Chromium is driven by playwright; without one of
them the tests are skipped.
"""

import asyncio
import json
import os
import re
import shutil
import socket
import threading
import time

import pytest
import uvicorn
from lmx.serving.page import page_response
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")

HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>alert(1)</script>"
ANSWER = [
    ("reasoning_content", "I count.", 0),
    ("content", HOSTILE, 0),
    ("content", " two", 1),
    ("content", " three", 2),
    ("content", " end", 2),
]
METRICS = """\
# TYPE lmx:generation_tokens_total counter
lmx:generation_tokens_total{{model_name="a"}} {tokens}
lmx:num_requests_running{{model_name="a"}} 3.0
lmx:num_requests_waiting{{model_name="a"}} 2.0
lmx:kv_cache_bytes{{model_name="a"}} 2.5e+09
lmx:prefix_cache_queries_total{{model_name="a"}} {tokens}
lmx:prefix_cache_hits_total{{model_name="a"}} {half}
lmx:spec_decode_num_draft_tokens_total{{model_name="a"}} 0.0
lmx:spec_decode_num_accepted_tokens_total{{model_name="a"}} 0.0
lmx:time_to_first_token_seconds_bucket{{le="0.1",model_name="a"}} {tokens}
lmx:time_to_first_token_seconds_bucket{{le="+Inf",model_name="a"}} {tokens}
"""


class CannedServer:
    """A server whose answers the test sets.

    Attributes:
        bodies: of the chats that were asked for.
        polls: of the metrics.
        waits: answers stop before their last token, until the client leaves.
        refusal: status, headers and message of the answer to the next chat.
        is_cut: the connection ends before the answer.
        gone: set when a client has left an answer.
        logged: errors of the page.
    """

    def __init__(self, api_key=None):
        self.api_key, self.bodies, self.polls = api_key, [], 0
        self.waits, self.refusal, self.is_cut = False, None, False
        self.gone, self.logged = threading.Event(), []
        routes = [
            Route("/", lambda request: page_response()),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/metrics", self._metrics),
        ]
        opened = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{opened.getsockname()[1]}/"
        options = {"log_config": None, "lifespan": "off", "ws": "none"}
        config = uvicorn.Config(Starlette(routes=routes), **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [opened]}
        )
        self._thread.start()

    def stop(self):
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _refuses(self, request):
        given = request.headers.get("authorization")
        if self.api_key and given != f"Bearer {self.api_key}":
            return _error(401, "Incorrect API key provided")
        return None

    async def _models(self, request):
        models = [{"id": "base", "parent": None}, {"id": "poet", "parent": "base"}]
        return self._refuses(request) or JSONResponse({"data": models})

    async def _metrics(self, request):
        self.polls += 1
        tokens = 100 * self.polls
        text = METRICS.format(tokens=tokens, half=tokens / 2)
        return PlainTextResponse(text)

    async def _chat(self, request):
        if refused := self._refuses(request):
            return refused
        self.bodies.append(await request.json())
        if self.refusal:
            refusal, self.refusal = self.refusal, None
            return _error(*refusal)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self):
        yield ": keep-alive\n\n" + _event(_chunk({"role": "assistant", "content": ""}))
        try:
            for number, (name, text, accepted) in enumerate(ANSWER, 1):
                is_last = number == len(ANSWER)
                if is_last and self.is_cut:
                    return
                while is_last and self.waits:
                    await asyncio.sleep(0.01)
                reason = "length" if is_last else None
                yield _event(_chunk({name: text}, reason) | _usage(number, accepted))
                await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.gone.set()
            raise
        yield _event({"choices": []} | _usage(len(ANSWER), 2)) + "data: [DONE]\n\n"


def _event(value):
    return f"data: {json.dumps(value)}\n\n"


def _chunk(delta, reason=None):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def _usage(tokens, accepted):
    details = {"accepted_prediction_tokens": accepted}
    counts = {"completion_tokens": tokens, "completion_tokens_details": details}
    return {"usage": counts}


def _error(status, message, headers=None):
    return JSONResponse({"error": {"message": message}}, status, headers)


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
    assert article.locator("> .text").text_content() == f"{HOSTILE} two three end"
    assert article.locator("span").all_text_contents() == [" two three"]
    details = article.locator("details")
    assert details.get_attribute("open") is None
    assert details.locator(".text").text_content() == "I count."
    assert page.locator("#log img, #log script").count() == 0
    assert page.title() == "lmx"
    note = article.locator(".note").inner_text()
    pattern = (
        r"5 tokens · [\d.]+ tokens/s · first token after [\d.]+ s · "
        r"2 accepted draft tokens \(underlined\) · cut at the limit of tokens"
    )
    assert re.fullmatch(pattern, note)


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
    assert page.inner_text("#status") == bad.nth(2).inner_text()


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
    stored = page.evaluate("[Object.values(sessionStorage), localStorage.length]")
    assert stored == [["right"], 0]
    assert page.evaluate("document.cookie") == ""


def test_real_server(browser, server):
    page = open_real(browser, server.url)
    page.fill("#max_tokens", "5")
    page.fill("#temperature", "0")
    ask(page)
    answered(page)
    [message] = server.chat("Hello", max_tokens=5, temperature=0)["choices"]
    shown = page.locator("article > .text").text_content()
    assert shown == message["message"]["content"]
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
@pytest.mark.parametrize("width", [360, 1200])
def test_layout_and_contrast(open_page, width, scheme):
    page, _ = open_page(width=width, color_scheme=scheme)
    ask(page, "x" * 500)
    answered(page)
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
    for selector in (".user", "article > .text", "article span", ".note", "#send"):
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
