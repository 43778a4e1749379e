"""The multi-token-prediction heads in checkpoints: layouts, copies, other programs."""

import mlx.core as mx
import mlx_lm
import pytest
from lmx.errors import UserError
from lmx.models.drafters.mtp import MTPHead
from lmx.models.loader import load
from lmx.models.mtp_weights import MTP_FILE, copy_mtp, read_mtp
from mlx.utils import tree_flatten
from tiny_mtp import EXPERTS, QWEN3_NEXT, VOCABULARY, WIDTH, write_published

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


def test_quantized_head_loads_and_is_copied_dequantized(tmp_path, tokenizer_folder):
    model, head, config = write_published(tmp_path, tokenizer_folder)
    tensors = dict(tree_flatten(head.parameters()))
    grids = {"fc": (64, 8), "layers.0.mlp.down_proj": (32, 4)}
    for path, (group_size, bits) in grids.items():
        parts = mx.quantize(tensors.pop(f"{path}.weight"), group_size, bits)
        names = (f"{path}.{leaf}" for leaf in ("weight", "scales", "biases"))
        tensors |= dict(zip(names, parts, strict=True))
    folder = tmp_path / "quantized"
    folder.mkdir()
    renamed = {f"mtp.{name}": value for name, value in tensors.items()}
    mx.save_safetensors(str(folder / MTP_FILE), renamed, {"format": "mlx"})
    with pytest.raises(UserError, match="no grid"):
        MTPHead.load(folder, config, model)
    layer = {"group_size": 32, "bits": 4}
    block = {"group_size": 64, "bits": 8, "mtp.layers.0.mlp.down_proj": layer}
    config["quantization"] = block
    loaded = MTPHead.load(folder, config, model)
    assert (loaded.fc.bits, loaded.layers[0].mlp.down_proj.bits) == (8, 4)

    target = tmp_path / "copy"
    target.mkdir()
    copy_mtp(folder, target, config)
    copied = MTPHead.load(target, config | {"quantization": None}, model)
    states = mx.random.normal((1, TOKENS.shape[1], WIDTH), key=mx.random.key(0))
    outputs = [
        each(TOKENS, states, each.make_cache()) for each in (loaded, copied, head)
    ]
    assert mx.allclose(outputs[0], outputs[1], atol=1e-4)
    assert not mx.allclose(outputs[0], outputs[2], atol=1e-3)


def test_heads_that_do_not_fit_are_refused(tmp_path, tokenizer_folder, make_checkpoint):
    model, _, config = write_published(tmp_path, tokenizer_folder)
    weights = mx.load(str(tmp_path / "model.safetensors"))
    del weights["mtp.fc.weight"]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"mtp\.fc\.weight has the shape None"):
        MTPHead.load(tmp_path, config, model)
    llama = make_checkpoint(vocab_size=VOCABULARY)
    loaded = load(llama)
    with pytest.raises(UserError, match="no multi-token-prediction head"):
        MTPHead.load(llama, loaded.config, loaded.model)
    (tmp_path / "target").mkdir()
    copy_mtp(llama, tmp_path / "target", loaded.config)
    assert not list((tmp_path / "target").iterdir())
