"""Guarantees of every quantization method."""

import hashlib
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import mlx_lm
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.config.quantize import AWQConfig, GPTQConfig, RTNConfig
from lmx.models import checkpoint_writer
from lmx.models.loader import load
from lmx.quantization.packing import dequantize
from lmx.quantization.ptq.channel_scales.channel_scales import AWQScales, find_scales
from lmx.quantization.ptq.methods import METHODS
from lmx.quantization.target_layers import select_layers
from mlx.utils import tree_flatten
from quantization_samples import context_of, tensors_of, windows_of
from tiny_checkpoints import QWEN3_MOE

AWKWARD = {
    "dtype": "float16",
    "hidden_size": 192,
    "intermediate_size": 200,
    "tie_word_embeddings": False,
}
EVEN = {"dtype": "float32"}
# The grid does not depend on the model. So each grid is tested with one of two models:
# indivisible widths with lm_head, or even widths with tied embeddings.
GRIDS = [
    ({"bits": 2, "group_size": 32}, AWKWARD),
    ({"bits": 3}, EVEN),
    ({"bits": 4, "group_size": 128}, AWKWARD | {"hidden_size": 256}),
    ({"bits": 6}, AWKWARD),
    ({"mode": "mxfp4"}, AWKWARD),
    ({"mode": "nvfp4"}, EVEN),
    ({"mode": "mxfp8"}, AWKWARD),
]
WINDOWS = windows_of(mx.random.randint(0, 320, (24, 24), key=mx.random.key(1)))
TOKENS = mx.random.randint(0, 320, (2, 12), key=mx.random.key(0))

CONFIGS = {"rtn": RTNConfig, "gptq": GPTQConfig, "awq": AWQConfig}
pytestmark = pytest.mark.parametrize("method", METHODS)


def quantize(method, source, target, **settings):
    loaded = load(source, compute="stored")
    config = CONFIGS[method](**settings)
    plan = select_layers(loaded.model, config)
    dense = dict(tree_flatten(loaded.model.parameters()))
    with TemporaryDirectory() as folder:
        context = context_of(
            *(loaded.model, plan.specs, WINDOWS, Path(folder), loaded.dtype),
            reread=loaded.reread,
        )
        tensors = METHODS[method](config, context).quantize()
        mx.eval(tensors)
        if method == "awq":
            scales = find_scales(context, AWQScales(context), config)
            dense |= scales.changed(dense)
    unquantized = {
        k: v for k, v in dense.items() if k[: -len(".weight")] not in plan.specs
    }
    target.mkdir()
    checkpoint_writer.write_checkpoint(
        target,
        unquantized | tensors,
        loaded.config,
        companions=loaded.path,
        specs=plan.specs,
        kept=list(plan.skipped),
    )
    return plan, tensors, dense


@pytest.fixture(scope="module")
def quantized(make_checkpoint, tmp_path_factory):
    """A cached function that quantizes a model.

    (method, grid, model) -> checkpoint folder, plan, tensors, original weights.
    """
    results = {}

    def get_result(method, grid, model):
        key = method, *grid.items()
        if key not in results:
            source = make_checkpoint(num_hidden_layers=1, **model)
            folder = tmp_path_factory.mktemp("quantized") / "q"
            results[key] = folder, *quantize(method, source, folder, **grid)
        return results[key]

    return get_result


def relative_error(weight, expected):
    weight, expected = weight.astype(mx.float32), expected.astype(mx.float32)
    return (mx.linalg.norm(weight - expected) / mx.linalg.norm(expected)).item()


def grid_id(value):
    """Return the test id of a grid, or an empty id for its model."""
    return "" if "dtype" in value else "-".join(map(str, value.values()))


@pytest.mark.parametrize(("grid", "model"), GRIDS, ids=grid_id)
def test_tensors_are_near_the_weights_in_the_given_spec(method, quantized, grid, model):
    _, plan, tensors, dense = quantized(method, grid, model)
    assert len(plan.specs) > 2
    for path, spec in plan.specs.items():
        assert spec == QuantSpec(**grid)
        weight = dense[f"{path}.weight"]
        packed = tensors_of(tensors, path)
        rows, width = weight.shape
        assert packed["weight"].dtype == mx.uint32
        assert packed["weight"].shape == (rows, width * spec.bits // 32)
        assert packed["scales"].shape == (rows, width // spec.group_size)
        is_affine = spec.mode == "affine"
        stored = getattr(mx, model["dtype"])
        assert packed["scales"].dtype == (stored if is_affine else mx.uint8)
        options = {"bits": spec.bits, "group_size": spec.group_size, "mode": spec.mode}
        mlx_weight = mx.dequantize(
            *mx.quantize(weight, **options), **options, dtype=mx.float32
        )
        error = relative_error(dequantize(packed, spec, mx.float32), weight)
        # A lower output error can have a larger weight error. The same is true for the
        # compensation for embedding errors of a random model.
        assert error < min(0.8, 2.5 * relative_error(mlx_weight, weight))


@pytest.mark.parametrize(("grid", "model"), GRIDS, ids=grid_id)
def test_checkpoint_gives_the_same_logits_in_stock_mlx_lm(
    method, quantized, grid, model
):
    folder, *_ = quantized(method, grid, model)
    stock, _ = mlx_lm.load(str(folder))
    loaded_model = load(folder, compute="stored").model
    assert mx.array_equal(loaded_model(TOKENS[:1, :1]), stock(TOKENS[:1, :1]))
    stock.set_dtype(mx.float32)
    loaded_model = load(folder, compute="float32").model
    assert mx.allclose(loaded_model(TOKENS), stock(TOKENS), rtol=1e-4, atol=1e-4)


def test_layers_with_indivisible_widths_are_unchanged(method, quantized):
    folder, plan, _, dense = quantized(method, *GRIDS[2])
    path = "model.layers.0.mlp.down_proj"
    assert [*plan.skipped] == [path]
    files = mx.load(str(folder / "model.safetensors"))
    assert mx.array_equal(files[f"{path}.weight"], dense[f"{path}.weight"])
    assert f"{path}.scales" not in files
    mlx_lm.load(str(folder))


@pytest.mark.parametrize("mode", ["affine", "nvfp4", "mxfp8"])
def test_quantize_handles_experts_and_routers(method, mode, make_checkpoint, tmp_path):
    """Experts have 3-D weights, and the router has another bit width."""
    source = make_checkpoint(QWEN3_MOE, dtype="float32", num_hidden_layers=1)
    plan, tensors, _ = quantize(method, source, tmp_path / "q", mode=mode)
    assert plan.specs["model.layers.0.mlp.gate"].bits == 8
    scales = tensors["model.layers.0.mlp.switch_mlp.up_proj.scales"]
    assert scales.ndim == 3
    assert (scales.dtype == mx.uint8) == (mode != "affine")
    stock, _ = mlx_lm.load(str(tmp_path / "q"))
    assert stock.layers[0].mlp.gate.bits == 8
    loaded_model = load(tmp_path / "q", compute="stored").model
    assert mx.array_equal(loaded_model(TOKENS[:1, :1]), stock(TOKENS[:1, :1]))


def test_two_runs_write_the_same_bytes(method, quantized, make_checkpoint, tmp_path):
    grid, model = GRIDS[1]
    first_folder, *_ = quantized(method, grid, model)
    source = make_checkpoint(num_hidden_layers=1, **model)
    quantize(method, source, tmp_path / "second", **grid)
    digests = [
        {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}
        for folder in (first_folder, tmp_path / "second")
    ]
    assert digests[0] == digests[1]


def zero_some_weights(source, target):
    """A copy in which a layer, some rows and some groups are zero."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    weights = dict(mx.load(str(file)))
    for name, value in weights.items():
        if "o_proj" in name:
            weights[name] = mx.zeros_like(value)
        elif value.ndim == 2:
            # One group of each row, and whole rows.
            value[:, 32:64] = 0
            value[:4] = 0
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    return target


@pytest.mark.parametrize(
    "grid",
    [{"bits": 2, "group_size": 32}, {"mode": "mxfp4"}, {"mode": "nvfp4"}],
    ids=grid_id,
)
def test_zero_groups_stay_zero(method, grid, make_checkpoint, tmp_path):
    """A scale of zero made NaN weights in other tools: mlx #1028."""
    source = make_checkpoint(dtype="float16")
    source = zero_some_weights(source, tmp_path / "zeros")
    plan, tensors, dense = quantize(method, source, tmp_path / "q", **grid)
    for path, spec in plan.specs.items():
        weight = dequantize(tensors_of(tensors, path), spec, mx.float32)
        assert mx.isfinite(weight).all().item(), path
        zero = dense[f"{path}.weight"] == 0
        if method == "gptq":
            # The other weights of a row compensate for its errors, and layers that
            # write to the residual stream for those of earlier layers.
            writes = path.endswith(("o_proj", "down_proj"))
            zero = mx.all(zero, axis=-1, keepdims=True) & (not writes)
        assert not mx.any((weight != 0) & zero).item(), path
    logits = mlx_lm.load(str(tmp_path / "q"))[0](TOKENS)
    assert mx.isfinite(logits).all().item()
