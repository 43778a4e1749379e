"""Adapters of a server: named as models, in one batch, loaded and dropped."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from lmx.config.lora import LoRAConfig
from lmx.convert.importers import load_model
from lmx.generation.generator import Generator
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.models.lora import io, lora_model
from lmx.serving import service
from lmx.serving.engine_thread import ServedModel
from tiny_server import COMPLETIONS, TEMPLATE

pytestmark = pytest.mark.fused

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = "Once upon a time there was a"


@pytest.fixture(scope="module")
def folder(make_checkpoint):
    return make_checkpoint(
        dtype="float32", num_hidden_layers=2, max_position_embeddings=4096
    )


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """Folders of adapters by name."""
    folders = {}
    for seed, name in enumerate(("red", "blue")):
        model = load_model(folder).model
        config = LoRAConfig(rank=2 + 2 * seed, target_modules=["self_attn.*"])
        keys = lora_model.attach(model, config, seed=seed)
        layers, parameters = lora_model.adapted_layers(model), {}
        for path, layer in layers.items():
            noise = mx.random.normal(layer.lora_b.shape, key=mx.random.key(seed))
            parameters |= {
                f"{path}.lora_a": layer.lora_a,
                f"{path}.lora_b": 0.5 * noise,
            }
        folders[name] = tmp_path_factory.mktemp(name)
        options = {"layers": layers, "adapter": config, "keys": keys, "num_layers": 2}
        io.save_adapter(folders[name], parameters, **options)
    return folders


@pytest.fixture
def serve(folder, start):
    def serve(**http):
        def load():
            loaded = load_model(folder)
            loaded.tokenizer.chat_template = TEMPLATE
            generator = Generator(
                loaded.model, loaded.tokenizer, prefix_cache=PrefixCache(10_000_000)
            )
            return ServedModel(
                generator,
                load_adapter=lambda path: (
                    load_model(folder, adapter=path, lazy=True).model
                ),
            )

        return start(load, http={"adapter_loading": True} | http)

    return serve


def text(server, model, **options):
    body = {"prompt": PROMPT, "model": model, "temperature": 0, "ignore_eos": True}
    answer = server.complete(**body | {"max_tokens": 12} | options)
    assert answer["model"] == model
    return answer["choices"][0]["text"]


def alone(folder, path):
    loaded = load_model(folder, adapter=path)
    generator = Generator(loaded.model, loaded.tokenizer)
    prompt = generator.encode_text(PROMPT)
    return generator.generate(prompt, max_tokens=12, stop_tokens=()).text


def test_adapters_are_models(folder, adapters, serve):
    server = serve()
    expected = {"tiny": alone(folder, None)}
    for name, path in adapters.items():
        body = {"lora_name": name, "lora_path": str(path)}
        assert server.post(LOAD, body).json() == {"status": "loaded"}
        expected[name] = alone(folder, path)
    assert len({*expected.values()}) == 3
    models = server.client.get("/v1/models").json()["data"]
    assert [(m["id"], m["parent"]) for m in models] == [
        *(("tiny", None), ("red", "tiny"), ("blue", "tiny"))
    ]
    # All of them in one batch, and again with their prefixes stored.
    names = [*expected] * 4
    for _ in range(2):
        with ThreadPoolExecutor(len(names)) as pool:
            texts = [*pool.map(lambda name: text(server, name), names)]
        assert texts == [expected[name] for name in names]
    assert server.post(UNLOAD, {"lora_name": "red"}).json() == {"status": "dropped"}
    status, error = server.refused(COMPLETIONS, {"prompt": "a", "model": "red"})
    assert (status, error["code"]) == (404, "model_not_found")
    # Under the name of the first, nothing of it is left.
    server.post(LOAD, {"lora_name": "red", "lora_path": str(adapters["blue"])})
    assert text(server, "red") == expected["blue"]


def test_an_adapter_in_use_is_not_dropped(adapters, serve):
    server = serve()
    server.post(LOAD, {"lora_name": "red", "lora_path": str(adapters["red"])})
    body = {"prompt": PROMPT, "model": "red", "max_tokens": 200, "ignore_eos": True}
    with server.client.stream("POST", COMPLETIONS, json=body | {"stream": True}) as got:
        # Kept: when it goes, the response is closed, and the request is dropped.
        lines = got.iter_lines()
        next(lines)
        assert server.refused(UNLOAD, {"lora_name": "red"})[0] == 409
    server.until_idle()
    assert server.post(UNLOAD, {"lora_name": "red"}).status_code == 200


def test_wrong_adapters_are_refused(serve):
    server, nowhere = serve(), {"lora_path": "/nowhere"}
    for path, body, status, param in (
        (LOAD, {"lora_name": "a"}, 400, "lora_path"),
        (LOAD, {"lora_name": "a"} | nowhere, 400, "lora_path"),
        (LOAD, {"lora_name": "tiny"} | nowhere, 400, "lora_name"),
        (LOAD, {"lora_name": ""} | nowhere, 400, "lora_name"),
        (LOAD, {"lora_name": "a", "lora_path": "b", "c": 1}, 400, "c"),
        (LOAD, {"lora_name": "a", "lora_path": "x" * 3000}, 400, "lora_path"),
        (LOAD, {"lora_name": "a", "lora_path": "x" * 10_000}, 400, "lora_path"),
        (LOAD, {"lora_name": "a", "lora_path": "x\0"}, 400, "lora_path"),
        (UNLOAD, {"lora_name": "a"}, 404, "lora_name"),
        (UNLOAD, {"lora_name": "tiny"}, 404, "lora_name"),
    ):
        found, error = server.refused(path, body)
        assert (found, error["param"]) == (status, param), body


def test_an_adapter_may_go_before_its_request_comes(adapters, serve, monkeypatch):
    """The request does not get the model itself. Its neighbours go on."""
    server = serve()
    encode = service.encode_prompts

    def slow(*arguments):
        if arguments[1].model:
            assert server.post(UNLOAD, {"lora_name": "gone"}).status_code == 200
        return encode(*arguments)

    monkeypatch.setattr(service, "encode_prompts", slow)
    path = str(adapters["red"])
    server.post(LOAD, {"lora_name": "gone", "lora_path": path})
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(server.post, COMPLETIONS, body)
        status, error = server.refused(COMPLETIONS, body | {"model": "gone"})
        assert (status, error["code"]) == (404, "model_not_found")
        assert good.result().json()["usage"]["completion_tokens"] == 60


def test_loading_must_be_allowed(adapters, serve):
    """A client could read any file of the server."""
    body = {"lora_name": "red", "lora_path": str(adapters["red"])}
    assert serve(adapter_loading=False).refused(LOAD, body)[0] == 403
