"""LiteLLM in front of the server, as docs/serving/litellm.yaml has it: the APIs of
Anthropic and of OpenAI's responses. Skipped without the program `litellm`."""

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from test_output_formats import TOOLS, served
from tiny_server import TinyServer

CONFIG = Path(__file__).parents[2] / "docs/serving/litellm.yaml"
KEY = "sk-a-long-key-of-this-test-0123456789abcdef"
SCHEMA = TOOLS[0]["function"]["parameters"]
HI = [{"role": "user", "content": "Hi"}]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    """A client of the gateway."""
    program = shutil.which("litellm")
    if program is None:
        pytest.skip("there is no litellm")
    server = TinyServer(served(), max_tokens=300, thinking_budget=10)
    folder = tmp_path_factory.mktemp("gateway")
    config = folder / "litellm.yaml"
    text = CONFIG.read_text().replace("lm_studio/lmx", "lm_studio/tiny")
    config.write_text(
        text.replace("http://127.0.0.1:8080", str(server.client.base_url))
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "LITELLM_MASTER_KEY": KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    environment.pop("PYTHONPATH", None)
    command = [program, "--config", str(config), "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--telemetry", "False"],
            stdout=log,
            stderr=log,
            env=environment,
            cwd=folder,
        )
    client = httpx.Client(
        base_url=f"http://127.0.0.1:{port}",
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=60,
    )
    end = time.monotonic() + 240
    while time.monotonic() < end and process.poll() is None:
        try:
            if client.get("/health/liveliness").status_code == 200:
                break
        except httpx.TransportError:
            time.sleep(0.5)
    else:
        pytest.fail((folder / "log").read_text()[-2000:])
    yield client
    process.terminate()
    process.wait()
    assert server.stop() == 0


def post(gateway, path, **body):
    response = gateway.post(path, json={"model": "any-name"} | body)
    assert response.status_code == 200, response.text
    return response


def events(response):
    lines = response.text.splitlines()
    data = (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
    return [json.loads(value) for value in data if value != "[DONE]"]


def test_messages(gateway):
    tool = {"name": "raise", "description": "Raise it.", "input_schema": SCHEMA}
    body = {"messages": HI, "max_tokens": 200, "system": "Be brief."}
    plain = post(gateway, "/v1/messages", **body).json()
    assert plain["type"] == "message"
    assert plain["usage"]["output_tokens"] > 0
    choice = {"type": "any", "disable_parallel_tool_use": True}
    forced = body | {"tools": [tool], "tool_choice": choice}
    answer = post(gateway, "/v1/messages", **forced).json()
    (call,) = [part for part in answer["content"] if part["type"] == "tool_use"]
    assert (call["name"], answer["stop_reason"]) == ("raise", "tool_use")
    assert 0 <= call["input"]["level"] <= 9
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "done"}
    turns = [*HI, {"role": "assistant", "content": [call]}]
    turns.append({"role": "user", "content": [result]})
    after = post(gateway, "/v1/messages", **body | {"messages": turns, "tools": [tool]})
    assert after.json()["type"] == "message"
    streamed = events(post(gateway, "/v1/messages", **forced, stream=True))
    kinds = [event["type"] for event in streamed]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    parts = (event["delta"] for event in streamed if "delta" in event)
    arguments = "".join(part.get("partial_json", "") for part in parts)
    assert 0 <= json.loads(arguments)["level"] <= 9


def test_responses(gateway):
    tool = {"type": "function", "name": "raise", "parameters": SCHEMA, "strict": True}
    body = {"input": "Hi", "max_output_tokens": 300}
    plain = post(gateway, "/v1/responses", **body).json()
    assert plain["object"] == "response"
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    answer = post(gateway, "/v1/responses", **body, text={"format": form}).json()
    (message,) = [item for item in answer["output"] if item["type"] == "message"]
    assert 0 <= json.loads(message["content"][0]["text"])["level"] <= 9
    forced = body | {"tools": [tool], "tool_choice": "required"}
    forced["parallel_tool_calls"] = False
    answer = post(gateway, "/v1/responses", **forced).json()
    (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
    assert call["name"] == "raise"
    assert 0 <= json.loads(call["arguments"])["level"] <= 9
    streamed = events(post(gateway, "/v1/responses", **body, stream=True))
    assert streamed[0]["type"] == "response.created"
    assert streamed[-1]["type"] in ("response.completed", "response.incomplete")
