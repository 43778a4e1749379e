"""The multi-token-prediction heads in checkpoints: layouts, copies, other programs."""

import json
from dataclasses import replace

import mlx.core as mx
import mlx_lm
import pytest
from lmx.errors import UserError
from lmx.models import global_scale
from lmx.models.drafters.mtp import MTP_FILE, MTPHead, copy_mtp, is_split_head, read_mtp
from lmx.models.loader import load
from mlx.utils import tree_flatten
from tiny_mtp import EXPERTS, QWEN3_NEXT, WIDTH, write_published

TOKENS = mx.array([[5, 9, 11, 5, 9, 2, 7, 5, 9]])


def assert_equal(tensors, head, atol=0.0):
    expected = dict(tree_flatten(head.parameters()))
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert mx.allclose(tensors[name], value, rtol=0, atol=atol), name


@pytest.mark.parametrize(
    "changes", [{}, EXPERTS, QWEN3_NEXT], ids=["dense", "experts", "qwen3_next"]
)
def test_published_head_is_read_in_the_layout_of_mlx(
    tmp_path, tokenizer_folder, changes
):
    _, head, config = write_published(tmp_path / "hf", tokenizer_folder, **changes)
    tensors = read_mtp(tmp_path / "hf", config)
    assert_equal(tensors, head, atol=1e-6)
    # The control: the file has offsets from one.
    stored = mx.load(str(tmp_path / "hf/model.safetensors"))
    assert abs(stored["mtp.norm.weight"].mean().item()) < 0.1
    assert abs(tensors["norm.weight"].mean().item() - 1) < 0.1

    # A copy is in MLX's layout, and a copy of the copy is the same.
    for source, target in (("hf", "first"), ("first", "second")):
        (tmp_path / target).mkdir()
        copy_mtp(tmp_path / source, tmp_path / target, config)
        assert_equal(read_mtp(tmp_path / target, config), head, atol=1e-6)
    files = [(tmp_path / name / MTP_FILE).read_bytes() for name in ("first", "second")]
    assert files[0] == files[1]


def test_single_experts_are_stacked(tmp_path, tokenizer_folder):
    folder = tmp_path / "hf"
    _, head, config = write_published(folder, tokenizer_folder, **EXPERTS)
    weights = mx.load(str(folder / "model.safetensors"))
    path = "mtp.layers.0.mlp.experts"
    gate_up = weights.pop(f"{path}.gate_up_proj")
    down = weights.pop(f"{path}.down_proj")
    for index in range(len(down)):
        gate, up = mx.split(gate_up[index], 2)
        layers = {"gate_proj": gate, "up_proj": up, "down_proj": down[index]}
        weights |= {f"{path}.{index}.{k}.weight": v for k, v in layers.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    assert_equal(read_mtp(folder, config), head, atol=1e-6)
    weights.pop(f"{path}.1.up_proj.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"an expert of .*up_proj.* is missing"):
        read_mtp(folder, config)


def test_mlx_lm_loads_the_same_model_with_a_head_beside_it(tmp_path, tokenizer_folder):
    model, _, config = write_published(tmp_path, tokenizer_folder)
    expected = model(TOKENS)
    assert mx.allclose(mlx_lm.load(str(tmp_path))[0](TOKENS), expected, atol=1e-4)
    weights = dict(tree_flatten(model.parameters()))
    copy_mtp(tmp_path, tmp_path, config)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "mlx"})
    assert mx.allclose(mlx_lm.load(str(tmp_path))[0](TOKENS), expected, atol=1e-4)
    assert mx.allclose(load(tmp_path).model(TOKENS), expected, atol=1e-4)
    assert read_mtp(tmp_path, config)


def quantize_layers(head, grids):
    """The tensors of a head with some layers quantized, by path and grid."""
    tensors = dict(tree_flatten(head.parameters()))
    for path, (group_size, bits) in grids.items():
        parts = mx.quantize(tensors.pop(f"{path}.weight"), group_size, bits)
        names = (f"{path}.{leaf}" for leaf in ("weight", "scales", "biases"))
        tensors |= dict(zip(names, parts, strict=True))
    return tensors


def outputs(head):
    states = mx.random.normal((1, TOKENS.shape[1], WIDTH), key=mx.random.key(0))
    return head(TOKENS, states, head.make_cache())


GRIDS = {"fc": (64, 8), "layers.0.mlp.down_proj": (32, 4)}


def test_quantized_head_loads_and_is_copied_dequantized(tmp_path, tokenizer_folder):
    _, head, config = write_published(tmp_path, tokenizer_folder)
    folder, target = tmp_path / "quantized", tmp_path / "copy"
    folder.mkdir()
    tensors = quantize_layers(head, GRIDS)
    renamed = {f"mtp.{name}": value for name, value in tensors.items()}
    mx.save_safetensors(str(folder / MTP_FILE), renamed, {"format": "mlx"})
    base = replace(load(tmp_path), path=folder, config=config)
    with pytest.raises(UserError, match="no grid"):
        MTPHead.load(folder, base)
    layer = {"group_size": 32, "bits": 4}
    block = {"group_size": 64, "bits": 8, "mtp.layers.0.mlp.down_proj": layer}
    quantized = replace(base, config=config | {"quantization": block})
    loaded = MTPHead.load(folder, quantized)
    assert (loaded.fc.bits, loaded.layers[0].mlp.down_proj.bits) == (8, 4)

    target.mkdir()
    copy_mtp(folder, target, quantized.config)
    copied = MTPHead.load(target, replace(base, path=target))
    assert mx.allclose(outputs(loaded), outputs(copied), atol=1e-4)
    assert not mx.allclose(outputs(loaded), outputs(head), atol=1e-3)


def test_experts_with_a_global_scale_load_and_are_copied_dequantized(
    tmp_path, tokenizer_folder
):
    _, head, config = write_published(tmp_path, tokenizer_folder, **EXPERTS)
    folder, target = tmp_path / "quantized", tmp_path / "copy"
    folder.mkdir()
    path = "layers.0.mlp.switch_mlp.up_proj"
    tensors = dict(tree_flatten(head.parameters()))
    for name, value in global_scale.quantize(tensors[f"{path}.weight"]).items():
        tensors[f"{path}.{name}"] = value
    renamed = {f"mtp.{name}": value for name, value in tensors.items()}
    mx.save_safetensors(str(folder / MTP_FILE), renamed, {"format": "mlx"})
    layer = {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True}
    block = {"group_size": 64, "bits": 8, f"mtp.{path}": layer}
    config |= {"quantization": block}
    base = replace(load(tmp_path), path=folder, config=config)
    loaded = MTPHead.load(folder, base)
    target.mkdir()
    copy_mtp(folder, target, config)
    copied = MTPHead.load(target, replace(base, path=target))
    # The copy is in bfloat16.
    assert mx.allclose(outputs(loaded), outputs(copied), atol=0.01)
    assert mx.allclose(outputs(loaded), outputs(head), atol=0.1)
    loaded.layers[0].mlp.switch_mlp.up_proj.global_scale = mx.full((4,), 2688.0)
    assert not mx.allclose(outputs(loaded), outputs(head), atol=0.1)


def test_head_that_was_split_off_loads(tmp_path, tokenizer_folder, make_checkpoint):
    """As mlx-vlm writes it: names without a prefix, and a config of its own."""
    _, head, config = write_published(tmp_path / "base", tokenizer_folder)
    folder = tmp_path / "drafter"
    folder.mkdir()
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        quantize_layers(head, {"fc": (64, 8), "layers.0.mlp.down_proj": (32, 8)}),
        {"format": "mlx"},
    )
    block = {"group_size": 64, "bits": 8}
    block["layers.0.mlp.down_proj"] = {"group_size": 32, "bits": 8}
    own = {"model_type": "qwen3_5_mtp", "text_config": config["text_config"]}
    (folder / "config.json").write_text(json.dumps(own | {"quantization": block}))
    assert is_split_head(folder)
    assert not is_split_head(tmp_path / "base")
    loaded = MTPHead.load(folder, load(tmp_path / "base"))
    assert mx.allclose(outputs(loaded), outputs(head), atol=0.05)
    with pytest.raises(UserError, match="this llama model has no"):
        MTPHead.load(folder, load(make_checkpoint()))


def test_heads_that_do_not_fit_are_refused(tmp_path, tokenizer_folder, make_checkpoint):
    write_published(tmp_path, tokenizer_folder)
    weights = mx.load(str(tmp_path / "model.safetensors"))
    del weights["mtp.fc.weight"]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"tensor fc\.weight is missing"):
        MTPHead.load(tmp_path, load(tmp_path))
    llama = load(make_checkpoint())
    with pytest.raises(UserError, match="no multi-token-prediction head"):
        MTPHead.load(llama.path, llama)
    (tmp_path / "target").mkdir()
    copy_mtp(llama.path, tmp_path / "target", llama.config)
    assert not list((tmp_path / "target").iterdir())
