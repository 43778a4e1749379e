"""GPTQ, AWQ and compressed-tensors checkpoints are imported bit for bit."""

import json
import shutil

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from lmx.convert.importers import load_model, resolve_checkpoint
from lmx.convert.importers.convert import convert_checkpoint
from lmx.errors import UserError
from lmx.models.dtypes import set_compute_dtype
from lmx.models.loader import load
from mlx.utils import tree_flatten
from packers import awq, compressed, gptq, random_codes, write_checkpoint
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import QWEN3_MOE

TOKENS = mx.random.randint(0, 320, (2, 9), key=mx.random.key(0))
DOWN = "model.layers.0.mlp.down_proj"
QUERY = "model.layers.0.self_attn.q_proj"


def gptq_format(bits, size, *, symmetric=False, version="gptq", order=True):
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "sym": symmetric,
        "desc_act": False,
        "checkpoint_format": version,
    }
    offset = 1 if version == "gptq" else 0
    packed = lambda c: gptq(c, bits, offset=offset, store_group_index=order)  # noqa: E731
    return bits, size, symmetric, packed, settings


def awq_format(size):
    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    return 4, size, False, lambda c: awq(c, 4), settings


def compressed_format(bits, size, *, symmetric=True):
    scheme = {"num_bits": bits, "group_size": size, "symmetric": symmetric}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": scheme}},
    }
    packed = lambda c: compressed(c, bits, symmetric=symmetric)  # noqa: E731
    return bits, size, symmetric, packed, settings


FORMATS = {
    "gptq": gptq_format(4, 32),
    "gptq v2": gptq_format(4, 64, version="gptq_v2"),
    "gptq symmetric": gptq_format(4, 128, symmetric=True),
    "gptq without g_idx": gptq_format(4, 64, order=False),
    "gptq 2 bits": gptq_format(2, 64),
    "gptq 3 bits": gptq_format(3, 32),
    "gptq 8 bits": gptq_format(8, 32),
    "gptq per channel": gptq_format(4, -1, symmetric=True, order=False),
    "gptq group size 256": gptq_format(8, 256, symmetric=True),
    "gptq group size 96": gptq_format(4, 96),
    "awq": awq_format(32),
    "awq group size 128": awq_format(128),
    "awq per channel": awq_format(-1),
    "compressed": compressed_format(4, 32),
    "compressed group size 128": compressed_format(8, 128),
    "compressed asymmetric": compressed_format(4, 64, symmetric=False),
    "compressed 8 bits": compressed_format(8, 32, symmetric=False),
}


@pytest.fixture(scope="module")
def base(make_checkpoint):
    return make_checkpoint(tie_word_embeddings=False)


@pytest.fixture
def make_packed(base, tmp_path):
    """A function that writes a packed checkpoint in a format."""

    def make_checkpoint_of(
        checkpoint_format, change=lambda name, codes, rng: codes, base=base
    ):
        bits, size, symmetric, packed, settings = checkpoint_format
        rng = np.random.default_rng(0)

        def make_codes(name, outputs, inputs):
            codes = random_codes(
                rng, outputs, inputs, bits=bits, size=size, symmetric=symmetric
            )
            return change(name, codes, rng)

        return write_checkpoint(
            base, tmp_path / "foreign", make_codes, packed, settings
        )

    return make_checkpoint_of


def dequantized_weights(folder):
    """Return the dequantized weights of an MLX checkpoint in float64, by path."""
    block = json.loads((folder / "config.json").read_text())["quantization"]
    tensors = mx.load(str(folder / "model.safetensors"))
    weights = {}
    for path in (n.removesuffix(".scales") for n in tensors if n.endswith(".scales")):
        grid = block.get(path, block)
        parts = (tensors[f"{path}.{leaf}"] for leaf in ("weight", "scales", "biases"))
        packed, *parameters = parts
        weight = mx.dequantize(
            packed,
            *(value.astype(mx.float32) for value in parameters),
            group_size=grid["group_size"],
            bits=grid["bits"],
        )
        weights[path] = np.array(weight).astype(np.float64)
    return weights


def convert(checkpoint, dtype=None):
    target = checkpoint.folder.with_name("target")
    target.mkdir()
    convert_checkpoint(checkpoint.folder, target, dtype)
    return target


@pytest.mark.parametrize("checkpoint_format", FORMATS.values(), ids=FORMATS)
def test_imported_weights_are_bit_identical(make_packed, checkpoint_format):
    checkpoint = make_packed(checkpoint_format)
    target = convert(checkpoint)
    weights = dequantized_weights(target)
    assert weights.keys() == checkpoint.layers.keys()
    for path, codes in checkpoint.layers.items():
        assert np.array_equal(weights[path], codes.weight), path


@pytest.mark.parametrize(
    "name", ["gptq", "gptq 3 bits", "awq", "compressed asymmetric"]
)
def test_logits_equal_those_of_the_dense_model(make_packed, name):
    checkpoint = make_packed(FORMATS[name])
    logits, dense_logits = (
        load_model(f).model(TOKENS) for f in (checkpoint.folder, checkpoint.dense)
    )
    assert mx.allclose(logits, dense_logits, rtol=1e-4, atol=1e-4)
    # Logits near zero would hide a difference.
    assert mx.abs(dense_logits).max().item() > 0.1


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed"])
def test_experts_are_stacked(make_packed, make_checkpoint, name):
    checkpoint = make_packed(FORMATS[name], base=make_checkpoint(QWEN3_MOE))
    folder = resolve_checkpoint(checkpoint.folder)
    weights = dequantized_weights(folder)["model.layers.1.mlp.switch_mlp.up_proj"]
    for number, weight in enumerate(weights):
        path = f"model.layers.1.mlp.experts.{number}.up_proj"
        assert np.array_equal(weight, checkpoint.layers[path].weight)
    logits, dense_logits = (load(f).model(TOKENS) for f in (folder, checkpoint.dense))
    assert mx.allclose(logits, dense_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_tied", [True, None])
def test_a_head_of_its_own_is_imported(make_packed, is_tied):
    checkpoint = make_packed(FORMATS["gptq"])
    expected = load_model(checkpoint.dense).model(TOKENS)
    file = checkpoint.folder / "config.json"
    config = json.loads(file.read_text())
    del config["tie_word_embeddings"]
    config |= {"tie_word_embeddings": True} if is_tied else {}
    file.write_text(json.dumps(config))
    if is_tied:
        with pytest.warns(UserWarning, match="lm_head.weight has other values"):
            target = convert(checkpoint)
    else:
        target = convert(checkpoint)
    actual = load_model(target).model(TOKENS)
    assert mx.allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_rope_parameters_are_imported(make_packed):
    checkpoint = make_packed(FORMATS["gptq"])
    for folder in (checkpoint.folder, checkpoint.dense):
        file = folder / "config.json"
        config = json.loads(file.read_text()) | {"rope_theta": 5e5}
        if folder == checkpoint.folder:
            config["rope_parameters"] = {"rope_theta": config.pop("rope_theta")}
        file.write_text(json.dumps(config))
    expected = load_model(checkpoint.dense).model(TOKENS)
    actual = load_model(convert(checkpoint)).model(TOKENS)
    assert mx.allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gptq symmetric", "awq", "compressed"])
def test_stock_mlx_lm_loads_the_import(make_packed, name):
    target = convert(make_packed(FORMATS[name]))
    stock, model = mlx_lm.load(str(target))[0], load(target, compute="stored").model
    weights = dict(tree_flatten(stock.parameters()))
    for path, value in tree_flatten(model.parameters()):
        assert value.dtype == weights[path].dtype
        assert mx.array_equal(value, weights[path]), path
    set_compute_dtype(stock, mx.float32)
    model = load(target).model
    assert mx.allclose(stock(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-5)


def test_scales_keep_float16_only_if_exact(make_packed):
    types = {}
    for name in ("gptq symmetric", "gptq"):
        checkpoint = make_packed(FORMATS[name])
        tensors = mx.load(str(convert(checkpoint) / "model.safetensors"))
        types[name] = {
            tensors[f"{QUERY}.{leaf}"].dtype for leaf in ("scales", "biases")
        }
        shutil.rmtree(checkpoint.folder.parent)
    assert types == {"gptq symmetric": {mx.float16}, "gptq": {mx.float32}}


def test_requested_dtype_rounds_within_its_bound(make_packed):
    checkpoint = make_packed(FORMATS["awq"])
    weights = dequantized_weights(convert(checkpoint, mx.float16))
    codes = checkpoint.layers[QUERY]
    error = np.abs(weights[QUERY] - codes.weight)
    bias = (codes.zeros * codes.scales.astype(np.float64))[:, codes.group_index]
    assert error.max() > 0
    assert (error <= 2.0**-11 * bias + 1e-7).all()


def permute_down_proj(name, codes, rng):
    """Permute the groups of the down_proj columns (desc_act)."""
    if name.endswith("down_proj"):
        codes.group_index = rng.permutation(codes.group_index)
    return codes


def test_activation_order_of_down_proj_is_undone(make_packed):
    checkpoint = make_packed(FORMATS["gptq"], permute_down_proj)
    weights = dequantized_weights(resolve_checkpoint(checkpoint.folder))
    order = np.argsort(checkpoint.layers[DOWN].group_index, kind="stable")
    assert np.array_equal(weights[DOWN], checkpoint.layers[DOWN].weight[:, order])
    up = DOWN.replace("down", "up")
    assert np.array_equal(weights[up], checkpoint.layers[up].weight[order])
    logits, dense_logits = (
        load_model(f).model(TOKENS) for f in (checkpoint.folder, checkpoint.dense)
    )
    assert mx.allclose(logits, dense_logits, rtol=1e-4, atol=1e-4)


def test_permuted_whole_groups_are_imported(make_packed):
    def reverse_groups(name, codes, rng):
        codes.group_index = codes.group_index.max() - codes.group_index
        return codes

    checkpoint = make_packed(FORMATS["gptq"], reverse_groups)
    weights = dequantized_weights(resolve_checkpoint(checkpoint.folder))
    for path, codes in checkpoint.layers.items():
        assert np.array_equal(weights[path], codes.weight), path


def test_activation_order_of_shared_inputs_is_refused(make_packed):
    def permute_all(name, codes, rng):
        codes.group_index = rng.permutation(codes.group_index)
        return codes

    with pytest.raises(UserError, match="desc_act") as caught:
        resolve_checkpoint(make_packed(FORMATS["gptq"], permute_all).folder)
    assert caught.value.place == DOWN.replace("down", "gate")
    assert "static groups" in caught.value.hint


def test_unsupported_group_size_is_refused(make_packed):
    with pytest.raises(UserError, match="groups of 16 columns do not divide"):
        resolve_checkpoint(make_packed(gptq_format(4, 16)).folder)


def damage(checkpoint, change, **settings):
    tensors = load_file(checkpoint.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint.folder / "model.safetensors")
    file = checkpoint.folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= settings
    file.write_text(json.dumps(config))


def truncate(leaf):
    def change(tensors):
        tensors[f"{QUERY}.{leaf}"] = np.ascontiguousarray(
            tensors[f"{QUERY}.{leaf}"][:, :-1]
        )

    return change


def drop(name):
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("name", "change", "place", "message"),
    [
        ("gptq", drop(f"{QUERY}.qzeros"), f"{QUERY}.qzeros", "missing"),
        ("gptq", drop(f"{QUERY}.scales"), f"{QUERY}.scales", "missing"),
        ("gptq", truncate("qzeros"), f"{QUERY}.qzeros", "the shape is"),
        ("gptq", truncate("scales"), f"{QUERY}.scales", "the shape is"),
        ("awq", drop(f"{QUERY}.qzeros"), f"{QUERY}.qzeros", "missing"),
        ("awq", drop(f"{QUERY}.qweight"), f"{QUERY}.", "qweight of this layer"),
        ("awq", truncate("scales"), f"{QUERY}.scales", "the shape is"),
        (
            "compressed",
            truncate("weight_packed"),
            f"{QUERY}.weight_packed",
            "codes of 4",
        ),
        (
            "compressed asymmetric",
            drop(f"{QUERY}.weight_zero_point"),
            f"{QUERY}.weight_zero_point",
            "missing",
        ),
        ("awq", drop("model.norm.weight"), "foreign", "model.norm.weight is missing"),
    ],
)
def test_damaged_checkpoint_is_refused(make_packed, name, change, place, message):
    checkpoint = make_packed(FORMATS[name])
    damage(checkpoint, change)
    with pytest.raises(UserError, match=message) as caught:
        resolve_checkpoint(checkpoint.folder)
    assert place in caught.value.place


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gptq", {"checkpoint_format": "marlin"}, "packed for one kernel"),
        ("gptq", {"group_size": 64}, None),
        ("gptq", {"bits": 8}, "do not fit to 256 inputs"),
        ("gptq without g_idx", {"group_size": 32}, "the shape is"),
        ("awq", {"version": "gemv"}, "layout 'gemv'"),
        ("awq", {"group_size": 64}, "the shape is"),
    ],
)
def test_inconsistent_config_is_refused(make_packed, name, settings, message):
    checkpoint = make_packed(FORMATS[name])
    damage(checkpoint, lambda tensors: None, **settings)
    if message is None:
        # The stored g_idx takes precedence over the config.
        weights = dequantized_weights(resolve_checkpoint(checkpoint.folder))
        assert np.array_equal(weights[QUERY], checkpoint.layers[QUERY].weight)
        return
    with pytest.raises(UserError, match=message):
        resolve_checkpoint(checkpoint.folder)
