"""The script of the server's page in Node.js, on a small DOM: its texts are never HTML.

In a browser: test_page.py."""

import json
import subprocess
from pathlib import Path

import pytest
from canned_server import HOSTILE, CannedServer
from lmx.serving.markdown import MAX_CHARACTERS, MAX_DEPTH, markdown_nodes
from page_data import NODE, needs_node

MARKDOWN = f"""\
{HOSTILE}
**bold** `x < y` [link](https://example.org/) [trap](javascript:alert(1)) ![](data:x)

```python
{HOSTILE}
```
"""


@needs_node
def test_chat_again_and_reload():
    server = CannedServer()
    server.answer = [("content", MARKDOWN, 0), ("content", "\nThe end", 1)]
    try:
        command = [NODE, Path(__file__).with_name("page_dom.js"), server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    finally:
        server.stop()
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert "<strong>bold</strong>" in seen["asked"]
    assert '<code>x &lt; y</code> <a href="https://example.org/">' in seen["asked"]
    assert "[trap](javascript:alert(1))" in seen["asked"]
    assert "<img" not in seen["asked"]
    assert "<script" not in seen["asked"]
    assert seen["asked"].count("&lt;img src=x") == 2
    assert seen["copied"] == [f"{HOSTILE}\n"]
    assert seen["again"] == 2
    assert seen["marked"].endswith("<span>\nThe end</span></div>")
    whole = f"{MARKDOWN}\nThe end"
    turns = [(turn["role"], turn["content"]) for turn in seen["kept"]["turns"]]
    expected = ["Hello", whole, "More", whole]
    assert turns == list(zip(["user", "assistant"] * 2, expected, strict=True))
    first, again, second = server.bodies
    assert first == again
    assert [m["content"] for m in second["messages"]] == expected[:3]


@needs_node
def test_markdown_that_is_too_long_is_not_sent():
    server = CannedServer()
    long = "a" * (MAX_CHARACTERS - 5)
    server.answer = [("content", text, 0) for text in (long, *[" b"] * 30)]
    script = Path(__file__).with_name("page_dom.js").read_text()
    run = """(async () => {
      const page = await open();
      page.input.value = "Hello";
      page.composer.fire("submit");
      await until(() => page.log.find("again").length);
      process.exit();
    })();"""
    try:
        script = script[: script.index("(async () =>")] + run
        command = [NODE, "-e", script, "page", server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    finally:
        server.stop()
    assert done.returncode == 0, done.stderr
    assert len(long) <= server.longest <= MAX_CHARACTERS


def test_markdown_has_bounded_depth():
    for text in ("**" * 5000 + "a" + "**" * 5000, "> " * 90 + "a", "- " * 40 + "a"):
        nodes, depth = markdown_nodes(text), 0
        while len(nodes) and isinstance(nodes[-1], list):
            nodes, depth = nodes[-1][2:], depth + 1
        assert "a" in nodes
        assert 10 < depth <= MAX_DEPTH


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({"text": "*a*"}, 200, '[["p",{},["em",{},"a"]]]'),
        ({"text": "a" * 50_001}, 400, "text: must have at most 50,000 characters"),
        ({"text": None}, 400, "text: expected text"),
        ({"markdown": "a"}, 400, "Unrecognized"),
    ],
)
def test_markdown_of_the_server(server, body, status, part):
    response = server.post("/markdown", body)
    assert (response.status_code, part in response.text) == (status, True)


def test_markdown_needs_the_key(start):
    closed = start(http={"api_key": "right"})
    assert closed.post("/markdown", {"text": "a"}).status_code == 401


def test_limits_are_in_words(server):
    """They were 2.14748e+09."""
    _, error = server.refused("/v1/completions", {"prompt": "a", "max_tokens": 1 << 40})
    expected = "max_tokens: must be at most 2,147,483,648, got 1099511627776"
    assert error["message"] == expected
