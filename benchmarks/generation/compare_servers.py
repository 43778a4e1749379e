"""The same 40 requests to servers: status, finish reasons and fields of the answers.

    python benchmarks/generation/compare_servers.py lmx=http://127.0.0.1:8080 \\
        mlx-lm=http://127.0.0.1:8081

Every server must serve the same model. A row shows the status of each server, with the
finish reasons of its completions. The lists below it have the fields that only one of
two servers gives to requests that both answer with the same status.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TIMEOUT = 120.0
SECONDS_TO_CONNECT = 5.0
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "dim", "parameters": {"type": "object", "properties": {}}},
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@dataclass(frozen=True)
class Probe:
    """A request.

    Attributes:
        content: of the body; None = a GET.
    """

    name: str
    path: str
    content: bytes | None = None
    content_type: str = "application/json"


@dataclass(frozen=True)
class Outcome:
    """What a server answers.

    Attributes:
        status: of HTTP; a word if there is none.
        finish: the finish reasons of all completions.
        fields: paths of the answer, of all chunks of a stream.
        is_last: it is not healthy any more.
    """

    status: str
    finish: tuple[str, ...] = ()
    fields: frozenset[str] = field(default_factory=frozenset)
    is_last: bool = False

    def __str__(self) -> str:
        return " ".join([self.status, *self.finish]) + self.is_last * ", ends"


def chat(name: str, content: Any = "Count to three.", **body) -> Probe:
    """A chat of one message."""
    messages = {"messages": [{"role": "user", "content": content}]}
    return Probe(name, CHAT, _json(messages | {"max_tokens": 8} | body))


def complete(name: str, prompt: Any = "one, two,", **body) -> Probe:
    """A completion."""
    body = {"prompt": prompt, "max_tokens": 8} | body
    return Probe(name, COMPLETIONS, _json(body))


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
NAMED = {"name": "number", "schema": SCHEMA, "strict": True}
FORMAT = {"type": "json_schema", "json_schema": NAMED}
PROBES = [
    chat("chat"),
    chat("chat, stream", stream=True),
    chat("chat, stream with usage", **USAGE),
    chat("chat, max_completion_tokens", max_completion_tokens=4),
    chat("chat, no max_tokens", max_tokens=None, stop=["e", "a", " "]),
    chat("chat, n 2, temperature 1", n=2, temperature=1, seed=1),
    chat("chat, logprobs", logprobs=True, top_logprobs=2),
    chat("chat, logit_bias", logit_bias={"5": -100}),
    chat("chat, penalties", presence_penalty=1, frequency_penalty=1),
    chat("chat, JSON schema", max_tokens=64, response_format=FORMAT),
    chat("chat, JSON object", response_format={"type": "json_object"}),
    chat("chat, tools", tools=[TOOL], tool_choice="auto"),
    chat("chat, tool_choice required", tools=[TOOL], tool_choice="required"),
    chat("chat, parts of text", [{"type": "text", "text": "Count to three."}]),
    chat("chat, user, store, metadata", user="u", store=True, metadata={"a": "b"}),
    chat("chat, an image", [IMAGE]),
    complete("completion"),
    complete("completion, stream", stream=True),
    complete("completion, two prompts", ["one, two,", "a, b,"]),
    complete("completion, tokens", [5, 6, 7]),
    complete("completion, echo", echo=True),
    complete("completion, logprobs", logprobs=2),
    Probe("models", "/v1/models"),
    Probe("health", "/health"),
    Probe("metrics", "/metrics"),
    Probe("no JSON", CHAT, b'{"messages": ['),
    Probe("a list", CHAT, b"[]"),
    Probe("text/plain", CHAT, chat("").content, "text/plain"),
    Probe("no messages", CHAT, b'{"max_tokens": 8}'),
    Probe("empty messages", CHAT, b'{"messages": [], "max_tokens": 8}'),
    Probe(
        "unknown role",
        CHAT,
        _json({"messages": [{"role": "ghost", "content": "a"}], "max_tokens": 8}),
    ),
    chat("unknown parameter", max_tokns=8),
    chat("temperature -1", temperature=-1),
    chat("temperature hot", temperature="hot"),
    chat("top_p 2", top_p=2),
    chat("max_tokens 0", max_tokens=0),
    chat("logprobs of 100 tokens", logprobs=True, top_logprobs=100),
    chat("unknown model", model="no-such/model"),
    Probe("GET of a POST", CHAT),
    Probe("unknown path", "/v1/no-such-path", b"{}"),
]


def ask(client: httpx.Client, probe: Probe) -> Outcome:
    """The answer of a server; a connection that it breaks is an answer too."""
    headers = {"Content-Type": probe.content_type} if probe.content else {}
    method = "GET" if probe.content is None else "POST"
    try:
        response = client.request(
            method, probe.path, content=probe.content, headers=headers
        )
    except httpx.TimeoutException:
        return Outcome("timeout", is_last=not _is_healthy(client))
    except httpx.TransportError:
        return Outcome("closed", is_last=not _is_healthy(client))
    finish, paths = [], set()
    for value in _values(response.text):
        paths |= fields(value)
        choices = value.get("choices") if isinstance(value, dict) else None
        reasons = [choice.get("finish_reason") for choice in choices or []]
        finish += [reason for reason in reasons if reason is not None]
    status = str(response.status_code)
    is_last = not _is_healthy(client)
    return Outcome(status, tuple(finish), frozenset(paths), is_last)


def _is_healthy(client: httpx.Client) -> bool:
    """Whether it answers on a new connection: it may have closed the other one."""
    try:
        return httpx.get(client.base_url.join("/health")).status_code < 500
    except httpx.TransportError:
        return False


def _values(text: str) -> Iterator[Any]:
    """The JSON values of an answer or of its events."""
    lines = text.splitlines()
    events = [line[len("data: ") :] for line in lines if line.startswith("data: ")]
    for part in events or [text]:
        try:
            yield json.loads(part)
        except ValueError:
            continue


def fields(value: Any, path: str = "") -> set[str]:
    """The paths of the values in a JSON value, those that are null too."""
    if path.endswith(".logprobs.top_logprobs[]"):
        return {path}  # Its names are tokens.
    if isinstance(value, dict) and value:
        inner = ((f"{path}.{name}" if path else name, v) for name, v in value.items())
        return {found for name, v in inner for found in fields(v, name)}
    if isinstance(value, list) and value:
        return {found for v in value for found in fields(v, f"{path}[]")}
    return {path} if path else set()


def compare(servers: dict[str, str], probes: list[Probe]) -> Iterator[str]:
    """The lines of the tables. A server that has ended is not asked again."""
    timeout = httpx.Timeout(TIMEOUT, connect=SECONDS_TO_CONNECT)
    clients = {
        name: httpx.Client(base_url=url, timeout=timeout)
        for name, url in servers.items()
    }
    yield "  ".join([f"{'request':<30}", *(f"{name:<24}" for name in servers)])
    rows: list[dict[str, Outcome]] = []
    ended: set[str] = set()
    for probe in probes:
        rows.append(row := {})
        for name, client in clients.items():
            row[name] = Outcome("-") if name in ended else ask(client, probe)
            ended |= {name} if row[name].is_last else set()
        shown = [f"{outcome!s:<24}" for outcome in row.values()]
        mark = "" if len({str(outcome) for outcome in row.values()}) == 1 else "  *"
        yield ("  ".join([f"{probe.name:<30}", *shown]) + mark).rstrip()
    for client in clients.values():
        client.close()
    first, *others = servers
    for other in others:
        for owner, lacking in ((first, other), (other, first)):
            yield f"\nfields of {owner} that {lacking} has not, and in how many answers"
            for path, count in _lacking(rows, owner, lacking).most_common():
                yield f"{count:4}  {path}"


def _lacking(rows: list[dict[str, Outcome]], owner: str, lacking: str) -> Counter:
    """Fields of one server that another has not."""
    return Counter(
        path
        for row in rows
        if row[owner].status == row[lacking].status
        for path in row[owner].fields - row[lacking].fields
    )


def main() -> None:
    """Parse arguments, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    about = "a request that ends a server, to see its answers to the others"
    parser.add_argument("--skip", action="append", default=[], help=about)
    arguments = parser.parse_args()
    servers = dict(text.partition("=")[::2] for text in arguments.servers)
    probes = [probe for probe in PROBES if probe.name not in arguments.skip]
    for line in compare(servers, probes):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
