"""What every quantization method promises, whichever it is."""

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import mlx_lm
import pytest
from calibration_windows import windows_of
from lmx.config.quant_spec import QuantSpec
from lmx.config.quantize import AWQConfig, GPTQConfig, RTNConfig
from lmx.models import checkpoint_writer
from lmx.models.loader import load
from lmx.quantization.packing import expand
from lmx.quantization.ptq.base import PTQContext
from lmx.quantization.ptq.methods import METHODS
from lmx.quantization.target_layers import select_layers
from lmx.run.logger import RunLogger
from mlx.utils import tree_flatten
from pydantic import ValidationError
from tiny_checkpoints import QWEN3_MOE

AWKWARD = {
    "dtype": "float16",
    "hidden_size": 192,
    "intermediate_size": 200,
    "tie_word_embeddings": False,
}
EVEN = {"dtype": "float32"}
# No method looks at the model to know its grid, so every grid is met on one of two: of
# an awkward width, with rows of several groups and a head; or of even widths, tied.
GRIDS = [
    ({"bits": 2, "group_size": 32}, AWKWARD),
    ({"bits": 3}, EVEN),
    ({"bits": 4, "group_size": 128}, AWKWARD | {"hidden_size": 256}),
    ({"bits": 5}, EVEN),
    ({"bits": 6}, AWKWARD),
    ({"bits": 8}, EVEN),
    ({"mode": "mxfp4"}, AWKWARD),
    ({"mode": "nvfp4"}, EVEN),
    ({"mode": "mxfp8"}, AWKWARD),
]
WINDOWS = windows_of(mx.random.randint(0, 320, (48, 24), key=mx.random.key(1)))
TOKENS = mx.random.randint(0, 320, (2, 12), key=mx.random.key(0))

CONFIGS = {"rtn": RTNConfig, "gptq": GPTQConfig, "awq": AWQConfig}
pytestmark = pytest.mark.parametrize("method", METHODS)


def quantize(method, source, target, **settings):
    loaded = load(source, compute="stored")
    config = CONFIGS[method](**settings)
    selection = select_layers(loaded.model, config)
    dense = dict(tree_flatten(loaded.model.parameters()))
    with TemporaryDirectory() as folder:
        task = PTQContext(
            loaded.model,
            selection.specs,
            loaded.dtype,
            lambda tokens: WINDOWS,
            Path(folder),
            RunLogger(None, quiet=True),
        )
        tensors = METHODS[method](config, task).quantize()
        mx.eval(tensors)
    kept = {
        k: v for k, v in dense.items() if k[: -len(".weight")] not in selection.specs
    }
    target.mkdir()
    checkpoint_writer.write_checkpoint(
        target,
        kept | tensors,
        loaded.config,
        companions=loaded.path,
        specs=selection.specs,
        kept=list(selection.kept),
    )
    return selection, tensors, dense


@pytest.fixture(scope="module")
def quantized(make_checkpoint, tmp_path_factory):
    """A function of method, grid and model to what the one has made of the other: its
    folder, selection and tensors, and the weights it began with."""
    made = {}

    def of(method, grid, model):
        key = method, *grid.items()
        if key not in made:
            source = make_checkpoint(num_hidden_layers=2, **model)
            folder = tmp_path_factory.mktemp("quantized") / "q"
            made[key] = folder, *quantize(method, source, folder, **grid)
        return made[key]

    return of


def relative_error(found, wanted):
    found, wanted = found.astype(mx.float32), wanted.astype(mx.float32)
    return (mx.linalg.norm(found - wanted) / mx.linalg.norm(wanted)).item()


def test_settings(method):
    config = CONFIGS[method]()
    assert config.method == method
    assert (config.bits, config.group_size, config.mode) == (4, 64, "affine")
    with pytest.raises(ValidationError, match="group"):
        CONFIGS[method](group=32)
    with pytest.raises(ValidationError):
        CONFIGS[method](method="another")


def require(method, grid):
    """Skip grids that a method says it is not for, which only modes may be."""
    try:
        CONFIGS[method](**grid)
    except ValidationError:
        if "mode" not in grid:
            raise
        pytest.skip("not for this mode")


def without_folds(found, weight):
    """Without the factors that whole columns and whole rows may have been given."""
    for axis in (0, 1):
        factor = (found * weight).sum(axis=axis) / mx.square(weight).sum(axis=axis)
        found = found / mx.expand_dims(factor, axis)
    return found


def name_of(value):
    """Of a grid; its model goes without."""
    return "" if "dtype" in value else "-".join(map(str, value.values()))


@pytest.mark.parametrize(("grid", "model"), GRIDS, ids=name_of)
def test_near_the_weights_and_stored_as_asked(method, quantized, grid, model):
    require(method, grid)
    _, selection, tensors, dense = quantized(method, grid, model)
    assert len(selection.specs) > 2
    for path, spec in selection.specs.items():
        assert spec == QuantSpec(**grid)
        weight = dense[f"{path}.weight"]
        packed = {
            name: tensors[f"{path}.{name}"]
            for name in ("weight", "scales", "biases")
            if f"{path}.{name}" in tensors
        }
        rows, width = weight.shape
        assert packed["weight"].dtype == mx.uint32
        assert packed["weight"].shape == (rows, width * spec.bits // 32)
        assert packed["scales"].shape == (rows, width // spec.group_size)
        is_affine = spec.mode == "affine"
        stored = getattr(mx, model["dtype"])
        assert packed["scales"].dtype == (stored if is_affine else mx.uint8)
        options = {"bits": spec.bits, "group_size": spec.group_size, "mode": spec.mode}
        plain = mx.dequantize(
            *mx.quantize(weight, **options), **options, dtype=mx.float32
        )
        error = relative_error(
            without_folds(expand(packed, spec, mx.float32), weight), weight
        )
        # What is nearest for the layers' inputs may be further in the weights, and so
        # is what makes up for the errors of a random model's embedding.
        assert error < min(0.8, 2.5 * relative_error(plain, weight))


@pytest.mark.parametrize(("grid", "model"), GRIDS, ids=name_of)
def test_what_is_saved_is_what_stock_mlx_lm_runs(method, quantized, grid, model):
    require(method, grid)
    folder, *_ = quantized(method, grid, model)
    stock, _ = mlx_lm.load(str(folder))
    ours = load(folder, compute="stored").model
    assert mx.array_equal(ours(TOKENS[:1, :1]), stock(TOKENS[:1, :1]))
    stock.set_dtype(mx.float32)
    ours = load(folder, compute="float32").model
    assert mx.allclose(ours(TOKENS), stock(TOKENS), rtol=1e-4, atol=1e-4)


def test_awkward_widths_are_kept_as_they_were(method, quantized):
    folder, selection, _, dense = quantized(method, *GRIDS[2])
    down = [f"model.layers.{n}.mlp.down_proj" for n in range(2)]
    assert sorted(selection.kept) == down
    files = mx.load(str(folder / "model.safetensors"))
    for path in down:
        assert mx.array_equal(files[f"{path}.weight"], dense[f"{path}.weight"])
        assert f"{path}.scales" not in files
    mlx_lm.load(str(folder))


def test_a_mixture_of_experts(method, make_checkpoint, tmp_path):
    """Experts in three dimensions, and a router of its own bits."""
    source = make_checkpoint(QWEN3_MOE, dtype="float32", num_hidden_layers=1)
    selection, tensors, _ = quantize(method, source, tmp_path / "q", bits=4)
    assert selection.specs["model.layers.0.mlp.gate"].bits == 8
    assert tensors["model.layers.0.mlp.switch_mlp.up_proj.weight"].ndim == 3
    stock, _ = mlx_lm.load(str(tmp_path / "q"))
    assert stock.layers[0].mlp.gate.bits == 8
    ours = load(tmp_path / "q", compute="stored").model
    assert mx.allclose(ours(TOKENS), stock(TOKENS), rtol=1e-4, atol=1e-4)


def test_two_runs_leave_the_same_bytes(method, quantized, make_checkpoint, tmp_path):
    grid, model = GRIDS[1]
    one, *_ = quantized(method, grid, model)
    source = make_checkpoint(num_hidden_layers=2, **model)
    quantize(method, source, tmp_path / "two", **grid)
    digests = [
        {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}
        for folder in (one, tmp_path / "two")
    ]
    assert digests[0] == digests[1]
