"""Damaged model folders: one sentence names the file, the field and what is wrong."""

import json
import os
import shutil
import time

import mlx.core as mx
import mlx_lm  # noqa: F401
import pytest
from lmx.cli import main
from lmx.errors import UserError
from lmx.models.loader import build_model, load, load_tokenizer
from tiny_checkpoints import LLAMA, QWEN3_MOE


@pytest.fixture
def folder(make_checkpoint, tmp_path):
    return shutil.copytree(make_checkpoint(), tmp_path / "model")


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(folder) -> UserError:
    with pytest.raises(UserError) as caught:
        load(folder)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be a whole"),
        ({"hidden_size": -1}, "hidden_size is -1; it must be a whole number of at"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be a whole number"),
        ({"vocab_size": 1.5}, "vocab_size is 1.5; it must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be a whole"),
        ({"head_dim": []}, "head_dim is []; it must be a whole number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'; it must be a number of at"),
        ({"rope_theta": 0}, "rope_theta is 0; it must be a number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; it must be a number above"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be an object"),
        (
            {"num_hidden_layers": [2], "layer_types": ["full_attention"]},
            "num_hidden_layers is [2]; this architecture reads",
        ),
        ({"layer_types": []}, "layer_types has 0 entries for 1 layers"),
        ({"architectures": [[1]]}, "architectures is [[1]]; it must be a list"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'; this architecture reads"),
        ({"quantization": {"bits": 9, "group_size": 64}}, "quantization.bits is 9; it"),
        ({"quantization": {"bits": 4}}, "quantization.group_size is None; it must be"),
        ({"quantization": [4]}, "quantization is [4]; it must be an object"),
        ({"eos_token_id": "two"}, "eos_token_id is two; it must be a token id or a"),
        ({"num_key_value_heads": 7}, "the model does not load: Expected shape"),
        ({"head_dim": 1, "num_attention_heads": 128}, "the model does not load: "),
        ({"model_type": "a" * 999}, "model_type is 'aaaaaaa"),
        ({"model_type": "../llama"}, "mlx-lm has no model type '../llama'"),
    ],
)
def test_a_wrong_value_of_the_config_is_named(folder, changes, message):
    edit(folder / "config.json", **changes)
    fault = refusal(folder)
    assert fault.message.startswith(message)
    names_file = "does not load" not in message
    assert fault.place == str(folder / "config.json" if names_file else folder)


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (LLAMA, {"num_hidden_layers": 10**7}),
        (LLAMA, {"hidden_size": 2**30}),
        (LLAMA, {"vocab_size": 10**9}),
        (LLAMA, {"intermediate_size": 10**8}),
        (LLAMA, {"num_attention_heads": 10**8}),
        (QWEN3_MOE, {"num_experts": 10**7}),
        (QWEN3_MOE, {"text_config": {"num_hidden_layers": 10**7}}),
    ],
)
def test_sizes_beyond_the_weights_are_refused_before_a_model_is_built(
    make_checkpoint, tmp_path, base, changes, monkeypatch
):
    folder = shutil.copytree(make_checkpoint(base), tmp_path / "model")
    edit(folder / "config.json", **changes)
    start, peak = time.process_time(), mx.get_peak_memory()
    fault = refusal(folder)
    assert time.process_time() - start < 2
    assert mx.get_peak_memory() == peak
    [(key, value)] = changes.items()
    if isinstance(value, dict):
        [(name, value)] = value.items()
        key = f"{key}.{name}"
    assert fault.message.startswith(f"{key} is {value:,}, but ")
    assert fault.place == str(folder / "config.json")
    # The dry run reads the folder in the same place.
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: model\ndata: {train: builtin:stdlib}\nstages: [{quantize: {bits: 4}}]\n"
    )
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    assert main.train([str(recipe), "--dry-run"]) == 2
    assert time.process_time() - start < 2


def test_a_width_of_the_config_below_the_groups_of_codes_is_refused(folder):
    """MLX divides by the group size, which would be zero."""
    file, name = folder / "model.safetensors", "model.layers.0.mlp.down_proj"
    weights = mx.load(str(file))
    packed = mx.quantize(weights.pop(f"{name}.weight"), group_size=32, bits=4)
    leaves = ("weight", "scales", "biases")
    weights |= {f"{name}.{leaf}": v for leaf, v in zip(leaves, packed, strict=True)}
    mx.save_safetensors(str(file), weights)
    grid = {"group_size": 32, "bits": 4}
    edit(folder / "config.json", intermediate_size=2, quantization=grid)
    assert refusal(folder).message.startswith(f"{name} has 32 words of codes and 8 g")


def test_integers_in_place_of_weights_are_refused(folder):
    file = folder / "model.safetensors"
    weights = mx.load(str(file))
    codes = {name: value.view(mx.int16) for name, value in weights.items()}
    mx.save_safetensors(str(file), codes)
    assert refusal(folder).message.startswith("all tensors are integers")
    name = "model.layers.0.mlp.up_proj.weight"
    mx.save_safetensors(str(file), weights | {name: codes[name]})
    assert refusal(folder).message.startswith(f"{name} has values of mlx.core.int16")


@pytest.mark.parametrize(
    "header",
    [
        b"null",
        b"7",
        b"[" * 10**5,
        b"[1]",
        b'{"a": null}',
        b'{"a": 1}',
        b'{"a": {"dtype": "F32"}}',
        b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [0, 4294967296], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [], "data_offsets": 4}}',
        b'{"__metadata__": {"a": 1}}',
    ],
)
def test_a_damaged_header_is_named(folder, header):
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    fault = refusal(folder)
    assert "damaged" in fault.message
    assert fault.place == str(file)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "README.md"])
def test_a_pipe_in_the_folder_does_not_block(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(UserError) as caught:
        load(folder)
    is_config = name == "config.json"
    assert caught.value.place == str(folder if is_config else folder / name)


def test_a_file_of_a_terabyte_is_not_read(folder):
    with (folder / "tokenizer.json").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(UserError, match="at most 268,435,456 are read"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b"[]", "this is no JSON object"),
        ("tokenizer_config.json", b"[" * 10**5, "not JSON: nested too deeply"),
        ("tokenizer_config.json", b'{"eos_token": 3}', "eos_token is '3', a value of"),
        (
            "tokenizer_config.json",
            b'{"tool_parser_type": "odd"}',
            "mlx-lm has no tool_parser_type 'odd'",
        ),
        ("generation_config.json", b"null", "this is no JSON object"),
        ("generation_config.json", b"[]", "this is no JSON object"),
        ("generation_config.json", b"{", "not JSON"),
        ("chat_template.jinja", b"\xff", "not UTF-8 text: "),
        ("tokenizer.json", b'{"model": {"type": "odd"}}', "the tokenizer does not"),
        ("tokenizer.json", b"{", "the tokenizer does not"),
    ],
)
def test_a_damaged_tokenizer_file_is_named(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(folder)
    assert caught.value.message.startswith(message)
    assert caught.value.place == str(folder / name)


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ 1 / 0 }}"])
def test_a_damaged_chat_template_is_reported_when_it_is_used(folder, template, capsys):
    (folder / "chat_template.jinja").write_text(template)
    arguments = ["generate", str(folder), "--prompt", "a", "--max-tokens", "2"]
    assert main.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{folder}: the chat template rejects")
    assert main.main([*arguments, "--ignore-chat-template"]) == 0


def test_a_panic_of_a_library_becomes_an_error(folder, monkeypatch):
    class PanicException(BaseException):
        """As Rust libraries raise it."""

    PanicException.__module__ = "pyo3_runtime"

    def panic(*_, **__):
        raise PanicException("index out of bounds")

    import mlx_lm.utils

    monkeypatch.setattr(mlx_lm.utils, "load_tokenizer", panic)
    with pytest.raises(UserError, match="PanicException: index out of bounds"):
        load_tokenizer(folder)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(mlx_lm.utils, "load_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(folder)


def test_a_config_that_mlx_lm_rejects_is_one_sentence():
    broken = {k: v for k, v in LLAMA.items() if k != "rms_norm_eps"}
    with pytest.raises(UserError, match="rejects the config: TypeError"):
        build_model(broken)
