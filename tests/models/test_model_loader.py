"""Checkpoint loading and its error messages."""

import json
import shutil
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
from lmx.cpu.quantized_matmul import FastQuantizedLinear
from lmx.errors import UserError
from lmx.models.dtypes import set_compute_dtype
from lmx.models.loader import checkpoint_folder, load, load_tokenizer
from mlx.utils import tree_flatten


@pytest.fixture
def folder(make_checkpoint, tmp_path):
    """A valid checkpoint that a test may damage."""
    return shutil.copytree(make_checkpoint(), tmp_path / "model")


def edit(file, **changes):
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def load_error(source, **options):
    with pytest.raises(UserError) as caught:
        load(source, **options)
    return caught.value


def test_load_computes_in_float32_on_the_cpu_and_keeps_the_stored_dtype(
    make_checkpoint,
):
    folder = make_checkpoint(dtype="bfloat16")
    files = mx.load(str(folder / "model.safetensors"))
    loaded = load(folder)
    assert loaded.dtype == mx.bfloat16
    for name, value in tree_flatten(loaded.model.parameters()):
        assert value.dtype == mx.float32
        assert mx.array_equal(value, files[name].astype(mx.float32))


@pytest.mark.parametrize("compute", ["stored", "bfloat16"])
def test_load_casts_to_the_compute_dtype(folder, compute):
    model = load(folder, compute=compute).model
    expected_value = {"stored": mx.float16, "bfloat16": mx.bfloat16}[compute]
    assert {v.dtype for _, v in tree_flatten(model.parameters())} == {expected_value}


def test_load_as_stored_keeps_mixed_dtypes(folder):
    weights = mx.load(str(folder / "model.safetensors"))
    weights["model.norm.weight"] = mx.full((128,), 1 + 2**-20)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    stored = dict(tree_flatten(load(folder, compute="stored").model.parameters()))
    assert stored["model.norm.weight"].dtype == mx.float32
    assert stored["model.embed_tokens.weight"].dtype == mx.float16


def test_set_compute_dtype_respects_cast_predicate():
    class Corrected(nn.Module):
        cast_predicate = staticmethod(lambda path: "correction" not in path)

        def __init__(self):
            super().__init__()
            self.correction, self.weight = mx.ones(2), mx.ones(2)

    model = Corrected()
    set_compute_dtype(model, mx.float16)
    assert model.correction.dtype == mx.float32
    assert model.weight.dtype == mx.float16


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "ends"),
    [
        (2, [2, 0], None, {0, 2}),
        ([2, 0], 2, None, {0, 2}),
        (0, 1, None, {0, 1, 2}),
        (None, 1, None, {1, 2}),
        (1, None, None, {1, 2}),
        (None, None, None, {2}),
        (None, None, [2, 1], {1, 2}),
        (0, None, 1, {0, 1, 2}),
    ],
)
def test_load_merges_end_tokens_of_all_files(
    folder, config, generation, tokenizer, ends
):
    """The tokenizer's end token, 2, is always included."""
    edit(folder / "config.json", eos_token_id=config)
    edit(folder / "generation_config.json", eos_token_id=generation)
    edit(folder / "tokenizer_config.json", eos_token_ids=tokenizer)
    assert load_tokenizer(folder).eos_token_ids == ends
    loaded = load(folder)
    assert loaded.tokenizer.eos_token_ids == ends
    named = {*flat(config), *flat(generation), *flat(tokenizer)}
    assert set(flat(loaded.config.get("eos_token_id"))) == named


def flat(ends):
    return ends if isinstance(ends, list) else [ends] * (ends is not None)


def test_load_refuses_a_folder_without_config(tmp_path):
    fault = load_error(tmp_path)
    assert fault.message == "this folder is not a model: it has no config.json"
    assert fault.place == str(tmp_path)


def test_load_refuses_a_file(folder):
    assert "a checkpoint is a folder" in load_error(folder / "config.json").message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "names no model_type"),
        ("{}", "names no model_type"),
        ('{"model_type": 3}', "names no model_type"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_load_refuses_a_broken_config(folder, text, message):
    file = folder / "config.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    fault = load_error(folder)
    assert message in fault.message
    assert fault.place == str(file)


# `base` and `cache` are modules of mlx-lm that are not models. `olmo` ends the process
# if a package is missing.
@pytest.mark.parametrize("model_type", ["nonesuch", "base", "cache", "olmo"])
def test_load_refuses_an_unknown_model_type(folder, model_type):
    edit(folder / "config.json", model_type=model_type)
    fault = load_error(folder)
    assert fault.message == f"mlx-lm has no model type {model_type!r}"
    assert fault.place == str(folder / "config.json")


def test_load_names_a_missing_shard(folder):
    weights = mx.load(str(folder / "model.safetensors"))
    norm = weights.pop("model.norm.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    places = dict.fromkeys(weights, "model.safetensors")
    places |= {"model.norm.weight": "model-2.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert "model-2.safetensors is missing" in load_error(folder).hint
    mx.save_safetensors(
        str(folder / "model-2.safetensors"), {"model.norm.weight": norm}
    )
    load(folder)


@pytest.mark.parametrize("is_file", [False, True])
def test_named_chat_templates_need_a_default(folder, is_file):
    settings = folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    template = "{{ messages[0].content }}"
    if is_file:
        edit(settings, chat_template=None)
        (folder / "additional_chat_templates").mkdir()
        file = folder / "additional_chat_templates/rag.jinja"
        file.write_text(template)
    else:
        edit(settings, chat_template=[{"name": "rag", "template": template}])
    fault = load_error(folder)
    assert fault.message == "no chat template has the name 'default', only rag"
    # As the hint says.
    (folder / "chat_template.jinja").write_text(template)
    edit(settings, chat_template=None)
    assert load(folder).tokenizer.has_chat_template


@pytest.mark.parametrize("name", ["nobody/nothing-at-all", "./not/here", "a/b/c"])
def test_checkpoint_folder_refuses_unknown_names_offline(monkeypatch, name, tmp_path):
    import huggingface_hub.constants as constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError) as caught:
        checkpoint_folder(name)
    assert caught.value.place == name
    is_hub_id = name.count("/") == 1
    assert ("the Hub does not give it" in caught.value.message) == is_hub_id
    assert ("no such folder" in caught.value.message) != is_hub_id


CODE = """
from mlx_lm.models.llama import Model, ModelArgs
from pathlib import Path
(Path(__file__).parent / "ran").touch()
"""


def test_checkpoint_code_runs_only_with_trust_remote_code(folder):
    edit(folder / "config.json", model_file="custom.py")
    (folder / "custom.py").write_text(CODE)
    fault = load_error(folder)
    assert "custom.py" in fault.message
    assert "trust_remote_code" in fault.hint
    assert not (folder / "ran").exists()
    load(folder, trust_remote_code=True)
    assert (folder / "ran").exists()


def test_missing_checkpoint_code_is_named(folder):
    edit(folder / "config.json", model_file="custom.py")
    assert "custom.py" in load_error(folder, trust_remote_code=True).message


def test_tokenizer_code_is_refused_without_a_prompt(folder, monkeypatch):
    """transformers would prompt on the terminal."""

    def prompt(*_):
        raise AssertionError("prompted")

    monkeypatch.setattr("builtins.input", prompt)
    edit(
        folder / "tokenizer_config.json",
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": ["custom.Own", "custom.Own"]},
    )
    (folder / "custom.py").write_text(CODE)
    assert "tokenizer does not load" in load_error(folder).message
    assert not (folder / "ran").exists()


def test_quantized_models_use_all_cores(folder, tmp_path):
    import mlx_lm

    target = tmp_path / "quantized"
    mlx_lm.convert(str(folder), str(target), quantize=True)
    layer = load(target).model.layers[0].mlp.up_proj
    assert type(layer) is FastQuantizedLinear
    assert layer.scales.dtype == mx.float32


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(256, 9999, 4096), (256, 1000, 1000), (5000, 9999, 5000), (256, 256, 256)],
)
def test_importing_mlx_lm_only_raises_the_limit_on_open_files(soft, hard, expected):
    """macOS starts processes with 256 open files."""
    code = f"""
import resource
limits = [({soft}, {hard})]
resource.getrlimit = lambda kind: limits[-1]
resource.setrlimit = lambda kind, wanted: limits.append(wanted)
from lmx.models.loader import model_classes
from pathlib import Path
model_classes({{"model_type": "llama"}})
assert "mlx_lm.utils" in __import__("sys").modules
assert limits[-1] == ({expected}, {hard})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
