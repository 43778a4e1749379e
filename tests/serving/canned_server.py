"""A server of the page whose answers are canned, so that each token, error and end of
a connection comes when the test says so."""

import asyncio
import json
import socket
import threading

import uvicorn
from lmx.serving.markdown import markdown_nodes
from lmx.serving.page import page_response
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

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
        answer: the kind, text and accepted draft tokens so far of each chunk.
        bodies: of the chats that were asked for.
        polls: of the metrics.
        waits: answers stop before their last token, until the client leaves.
        refusal: status, headers and message of the answer to the next chat.
        is_cut: the connection ends before the answer.
        gone: set when a client has left an answer.
        logged: errors of the page.
        longest: characters of the longest Markdown that the page asked for.
    """

    def __init__(self, api_key=None):
        self.api_key, self.bodies, self.polls = api_key, [], 0
        self.answer, self.waits, self.refusal, self.is_cut = ANSWER, False, None, False
        self.gone, self.logged, self.longest = threading.Event(), [], 0
        routes = [
            Route("/", lambda request: page_response()),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/markdown", self._markdown, methods=["POST"]),
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

    async def _markdown(self, request):
        text = (await request.json())["text"]
        self.longest = max(self.longest, len(text))
        return self._refuses(request) or JSONResponse({"nodes": markdown_nodes(text)})

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
            for number, (name, text, accepted) in enumerate(self.answer, 1):
                is_last = number == len(self.answer)
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
        end = _usage(len(self.answer), self.answer[-1][2])
        yield _event({"choices": []} | end) + "data: [DONE]\n\n"


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
