"""A server on a thread of the test, with a tiny model."""

import json
import threading
import time

import httpx
from lmx.generation.sampling import Sampling
from lmx.serving.app import HTTPSettings
from lmx.serving.engine_thread import ServedModel
from lmx.serving.server import ModelServer
from lmx.serving.service import ServiceSettings
from tiny_generators import byte_tokenizer, tiny

SECONDS = 30
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def load(make=None, sampling=(), **options):
    """A function that makes a served model: by default a random Llama."""

    def load():
        from lmx.generation.generator import Generator
        from lmx.generation.kv_cache.prefix import PrefixCache

        if make:
            return ServedModel(make(), Sampling(**dict(sampling)))
        generator = Generator(
            tiny("llama"),
            byte_tokenizer(template=TEMPLATE),
            prefix_cache=PrefixCache(10_000_000),
            **options,
        )
        return ServedModel(generator, Sampling(**dict(sampling)))

    return load


class TinyServer:
    """A running server. Its requests are those of httpx, without its pool.

    Args:
        load: as for `ModelServer`.
        http: settings of `HTTPSettings`; the others are those of `ServiceSettings`.
    """

    def __init__(self, load, *, http=None, **settings):
        self.served = None

        def remember():
            self.served = load()
            return self.served

        self.server = ModelServer(
            remember,
            host="127.0.0.1",
            port=0,
            service=ServiceSettings(**{"model": "tiny", "max_tokens": 16} | settings),
            http=HTTPSettings(**http or {}),
        )
        self.url, self.thread = self.server.url, self.server.thread
        self.port = int(self.url.rsplit(":", 1)[1])
        self.code = None
        self._runner = threading.Thread(target=self._run)
        self._runner.start()
        self.client = httpx.Client(base_url=self.url, timeout=SECONDS)

    def _run(self):
        self.code = self.server.run()

    def stop(self):
        """End it; returns its exit code."""
        self.client.close()
        self.server.stop()
        return self.wait()

    def wait(self):
        self._runner.join(SECONDS)
        assert not self._runner.is_alive(), "the server hangs"
        return self.code

    @property
    def engine(self):
        return self.served.generator.engine

    # Requests

    def post(self, path, body, **options):
        return self.client.post(path, json=body, **options)

    def complete(self, prompt="Hello", **body):
        """The answer to a completion."""
        return _good(self.post(COMPLETIONS, {"prompt": prompt} | body))

    def chat(self, content="Hello", **body):
        """The answer to a chat of one message."""
        messages = [{"role": "user", "content": content}]
        return _good(self.post(CHAT, {"messages": messages} | body))

    def refused(self, path, body, **options):
        """The status and the error of a request that is refused."""
        response = self.post(path, body, **options)
        return response.status_code, response.json()["error"]

    def stream(self, path, body):
        """The chunks of a stream, which must end as it should."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line.startswith("data")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[len("data: ") :]) for line in lines[:-1]]

    def metrics(self):
        """Values by name, without those of other labels than the model's."""
        values = {}
        for line in self.client.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name.replace('model_name="tiny"', "")] = float(value)
        return values

    def until_idle(self, seconds=SECONDS):
        """Wait until no request runs or waits."""
        end = time.monotonic() + seconds
        while self.thread.open_requests or not self.engine.idle:
            assert time.monotonic() < end, "requests are open"
            time.sleep(0.005)


def _good(response):
    assert response.status_code == 200, response.text
    return response.json()


def joined(chunks):
    """The whole choices that the chunks of a stream of completions make."""
    choices = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"], {"text": "", "logprobs": None, "finish_reason": None}
            )
            assert choice["finish_reason"] is None, "a chunk after the last one"
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
            for name, values in (part["logprobs"] or {}).items():
                whole = choice["logprobs"] = choice["logprobs"] or {}
                whole.setdefault(name, []).extend(values)
    return [{"index": i} | choices[i] for i in sorted(choices)]


def joined_chat(chunks):
    """The whole choices that the chunks of a stream of chats make."""
    choices = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"], {"message": {}, "logprobs": None, "finish_reason": None}
            )
            assert choice["finish_reason"] is None, "a chunk after the last one"
            for name, value in part["delta"].items():
                if name == "tool_calls":
                    choice["message"].setdefault(name, []).extend(value)
                elif name == "role":
                    choice["message"][name] = value
                else:
                    before = choice["message"].get(name) or ""
                    choice["message"][name] = before + value
            choice["finish_reason"] = part["finish_reason"]
            if part["logprobs"]:
                whole = choice["logprobs"] = choice["logprobs"] or {"content": []}
                whole["content"] += part["logprobs"]["content"]
    return [{"index": i} | choices[i] for i in sorted(choices)]
