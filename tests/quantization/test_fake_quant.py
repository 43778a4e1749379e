"""Weights of the compiled training forward equal the exported weights."""

import itertools
import shutil

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.lora import LoRAConfig
from lmx.config.qat import QATConfig
from lmx.config.quant_spec import QuantizationConfig, QuantSpec
from lmx.data.batching import Batch
from lmx.models import checkpoint_writer
from lmx.models.cross_entropy import cross_entropy_sum
from lmx.models.dtypes import set_compute_dtype
from lmx.models.loader import load
from lmx.models.lora import lora_model
from lmx.quantization.packing import dequantize, pack
from lmx.quantization.qat.fake_quant import FakeQuant
from lmx.quantization.qat.quantizers import LSQQuantizer
from lmx.quantization.target_layers import QuantizationPlan, select_layers
from lmx.training.optimizers import OptimizerConfig
from lmx.training.step import TrainStep
from mlx.utils import tree_flatten, tree_unflatten

AFFINE = list(itertools.product((2, 3, 4, 5, 6, 8), (32, 64, 128)))
GRIDS = [QuantSpec(bits=b, group_size=g) for b, g in AFFINE]
GRIDS += [QuantSpec(mode=m) for m in ("mxfp4", "nvfp4", "mxfp8")]
# One of each number of bits, and the modes: every grid has kernels of its own.
FEW_GRIDS = [grid for grid in GRIDS if grid.group_size == 32 or grid.mode != "affine"]
LINEAR = [
    f"model.layers.{layer}.{path}"
    for layer in range(3)
    for path in (
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        *(f"self_attn.{x}_proj" for x in "qkvo"),
    )
]
LAYERS = ["self_attn.*", "mlp.*"]
SLOW_FUSED = pytest.mark.slow, pytest.mark.fused


class RecordingStep(TrainStep):
    """A step that also returns the weights of its compiled forward pass."""

    def _train(self, *inputs):
        outputs = super()._train(*inputs)
        forward_weights = dict(tree_flatten(self.model.parameters()))
        return *outputs, {k: v for k, v in forward_weights.items() if "lora" not in k}

    def __call__(self, batch, learning_rate, seed):
        mx.random.seed(seed)
        self.model.train()
        scalars = mx.array(learning_rate), mx.array(0.0)
        return self._train_batch(*self._arrays(batch), *scalars)


class Run:
    """Quantization-aware training with the setup of the train stage."""

    def __init__(self, folder, quantization, *, adapted, patterns=LAYERS, config=None):
        self.loaded = load(folder, compute="stored")
        model = self.loaded.model
        self.base = dict(tree_flatten(model.parameters()))
        if isinstance(quantization, QuantizationConfig):
            quantization = select_layers(model, quantization)
        self.plan = quantization
        if adapted:
            lora_model.attach(
                model, LoRAConfig(rank=4, target_modules=patterns), seed=1, merged=True
            )
        specs = self.plan.specs
        fake_quant = FakeQuant(model, specs, self.loaded.dtype, config)
        self.step = RecordingStep(
            model, OptimizerConfig(weight_decay=0.01), weight_transform=fake_quant
        )
        set_compute_dtype(model, mx.float32)

    def train(self, steps=1):
        for seed in range(steps):
            self.step.on_step(seed)
            results = self.step(batch(seed), 0.01, seed)
            mx.eval(results, self.step.parameters)
        return results

    def export(self, folder):
        folder.mkdir()
        parameters = self.step.parameters
        dense = lora_model.fuse(
            self.step.model, self.base, parameters, self.loaded.dtype
        )
        quantized_names = {f"{path}.weight" for path in self.plan.specs}
        weights = {k: v for k, v in dense.items() if k not in quantized_names}
        checkpoint_writer.write_checkpoint(
            folder,
            weights | self.step.weight_transform.export_tensors(parameters),
            self.loaded.config,
            companions=self.loaded.path,
            specs=self.plan.specs,
            kept=list(self.plan.skipped),
        )
        return folder


def batch(seed, size=2, length=8):
    tokens = mx.random.randint(0, 320, (size, length + 1), key=mx.random.key(seed))
    mask = mx.ones((size, length), dtype=mx.bool_)
    return Batch(tokens, mask, ("",) * size)


def reloaded(folder, plan: QuantizationPlan, dtype):
    """Return the weights of a checkpoint, dequantized with mx.dequantize."""
    tensors = mx.load(str(folder / "model.safetensors"))
    weights = {}
    for name, value in tensors.items():
        path, _, leaf = name.rpartition(".")
        spec = plan.specs.get(path)
        if spec is None or leaf == "bias":
            weights[name] = value
        elif leaf == "weight":
            weights[name] = mx.dequantize(
                value,
                tensors[f"{path}.scales"],
                tensors.get(f"{path}.biases"),
                spec.group_size,
                spec.bits,
                spec.mode,
                dtype=dtype,
            )
    return weights


def assert_exported_equals_forward(run, folder):
    """Assert that the next forward weights equal the exported weights bit for bit."""
    dtype = run.loaded.dtype
    stored = reloaded(run.export(folder), run.plan, dtype)
    *_, forward_weights = run.train()
    forward_weights = {
        k.replace(".linear.", "."): v for k, v in forward_weights.items()
    }
    assert forward_weights.keys() == stored.keys()
    for name, value in stored.items():
        assert value.dtype == dtype, name
        assert mx.array_equal(forward_weights[name], value.astype(mx.float32)), name


@pytest.mark.parametrize(
    ("grid", "adapted", "dtype"),
    [
        ("minmax", True, "float32"),
        ("minmax", True, "float16"),
        ("lsq", True, "bfloat16"),
        ("fixed_scale", False, "float32"),
        ("ternary", True, "float32"),
        pytest.param("minmax", False, "bfloat16", marks=SLOW_FUSED),
        pytest.param("lsq", False, "float16", marks=SLOW_FUSED),
        pytest.param("fixed_scale", True, "float16", marks=SLOW_FUSED),
    ],
)
def test_exported_weights_equal_forward_weights_for_every_quantizer(
    make_checkpoint, tmp_path, request, dtype, grid, adapted
):
    """Each layer has another grid. Layers with an unsupported mode or bit width use
    another quantizer."""
    folder = make_checkpoint(dtype=dtype, num_hidden_layers=3)
    grids = FEW_GRIDS if request.node.get_closest_marker("fused") else GRIDS
    if grid != "minmax":
        grids = [g for g in grids if g.bits in (2, 3, 8) or g.mode != "affine"]
    specs = dict(zip(LINEAR, itertools.cycle(grids), strict=False))
    config = QATConfig(bits=2, group_size=32, quantizer=grid)
    run = Run(folder, QuantizationPlan(specs, {}), adapted=adapted, config=config)
    first = dict(run.step.parameters)
    run.train(2)
    changed = {
        k for k, v in run.step.parameters.items() if mx.any(v != first[k]).item()
    }
    affine = {path: spec.bits for path, spec in specs.items() if spec.mode == "affine"}
    assert len(affine) > 9
    for path, bits in affine.items():
        learned = grid == "lsq" or (grid == "ternary" and bits == 2)
        assert (f"{path}.scales" in changed) == learned
    assert_exported_equals_forward(run, tmp_path / "out")


@pytest.mark.parametrize("grid", ["minmax", "lsq"])
def test_fake_quant_starts_after_n_steps(make_checkpoint, tmp_path, grid):
    config = QATConfig(
        bits=2, group_size=32, quantizer=grid, fake_quant_after_n_steps=2
    )
    folder = make_checkpoint(dtype="float32")
    run = Run(folder, config, adapted=False, config=config)
    full_precision = RecordingStep(
        load(folder, compute="stored").model, OptimizerConfig(weight_decay=0.01)
    )
    for seed in range(2):
        run.step.on_step(seed)
        quantized, expected = (
            s(batch(seed), 0.01, seed) for s in (run.step, full_precision)
        )
        assert quantized[0].item() == pytest.approx(expected[0].item(), rel=1e-6)
        mx.eval(run.step.parameters, full_precision.parameters)
    run.step.on_step(2)
    fake_quant, parameters = run.step.weight_transform, run.step.parameters
    path = "model.layers.0.mlp.up_proj"
    if grid == "lsq":
        # The scales are initialized from the current weights.
        initial = LSQQuantizer(run.plan.specs[path], mx.float32).init(
            parameters[f"{path}.weight"]
        )
        assert mx.array_equal(parameters[f"{path}.scales"], initial["scales"])
        assert not mx.array_equal(
            fake_quant.qparams[f"{path}.scales"], initial["scales"]
        )
    quantized, expected = (s(batch(2), 0.01, 2) for s in (run.step, full_precision))
    assert quantized[0].item() != pytest.approx(expected[0].item(), rel=0.01)
    assert_exported_equals_forward(run, tmp_path / "out")


@pytest.mark.parametrize(
    ("tied", "embeddings", "head", "adapted"),
    [
        (False, True, True, False),
        (False, True, False, True),
        (False, False, True, True),
        (True, True, True, True),
        (True, False, False, False),
    ],
)
def test_embeddings_and_head_are_quantized_by_choice(
    make_checkpoint, tmp_path, tied, embeddings, head, adapted
):
    folder = make_checkpoint(tie_word_embeddings=tied, attention_bias=True)
    overrides = {} if embeddings else {"model.embed_tokens": "skip"}
    overrides |= {} if head or tied else {"lm_head": "skip"}
    quantization = QuantizationConfig(overrides=overrides)
    run = Run(folder, quantization, adapted=adapted)
    assert ("model.embed_tokens" in run.plan.specs) == embeddings
    assert ("lm_head" in run.plan.specs) == (head and not tied)
    run.train(2)
    assert_exported_equals_forward(run, tmp_path / "out")


@pytest.mark.parametrize(
    ("grid", "adapted"), [("minmax", True), ("lsq", False), ("fixed_scale", True)]
)
def test_stock_mlx_lm_has_the_training_loss(make_checkpoint, tmp_path, adapted, grid):
    import mlx_lm
    from mlx_lm.utils import dequantize_model

    config = QATConfig(bits=2, quantizer=grid)
    folder = make_checkpoint(num_hidden_layers=2)
    run = Run(folder, config, adapted=adapted, config=config)
    run.train(3)
    model, _ = mlx_lm.load(str(run.export(tmp_path / "out")))
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    eval_batch = batch(9)
    logits = model(eval_batch.tokens[:, :-1])
    loss = cross_entropy_sum(logits, eval_batch.tokens[:, 1:], eval_batch.mask).item()
    assert run.step.evaluate([eval_batch])[0] == pytest.approx(loss, rel=1e-5)


def test_mixture_of_experts_exports_forward_weights(make_checkpoint, tmp_path):
    from tiny_checkpoints import QWEN3_MOE

    folder = make_checkpoint(QWEN3_MOE)
    run = Run(folder, QuantizationConfig(), adapted=True, patterns=["self_attn.*"])
    run.train(2)
    assert_exported_equals_forward(run, tmp_path / "out")


def test_other_dtypes_are_kept(make_checkpoint, tmp_path):
    """Router corrections, for example, are float32 in a 16-bit checkpoint."""
    folder = shutil.copytree(make_checkpoint(), tmp_path / "mixed")
    weights = mx.load(str(folder / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(mx.float32)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    run = Run(folder, QuantizationConfig(), adapted=False)
    run.train(2)
    stored = reloaded(run.export(tmp_path / "out"), run.plan, mx.float16)
    assert stored["model.norm.weight"].dtype == mx.float32
    *_, forward_weights = run.train()
    assert mx.array_equal(
        forward_weights["model.norm.weight"], stored["model.norm.weight"]
    )
    half = stored["model.norm.weight"].astype(mx.float16).astype(mx.float32)
    assert not mx.array_equal(half, stored["model.norm.weight"])


def test_quantizing_twice_would_change_codes():
    """Negative control: the export must not quantize the weights again."""
    weight = mx.random.normal((64, 256), key=mx.random.key(0))
    spec = QuantSpec(bits=4)
    once = pack(weight, spec, mx.float16)
    twice = pack(dequantize(once, spec, mx.float16), spec, mx.float16)
    changed = mx.mean(once["weight"] != twice["weight"]).item()
    assert changed > 0.05
    float32_packed = pack(weight, spec, mx.float32)
    assert not mx.array_equal(float32_packed["weight"], once["weight"])


def test_full_gradients_are_straight_through(make_checkpoint):
    """Each master weight has the gradient of its quantized weight."""
    run = Run(make_checkpoint(dtype="float32"), QuantizationConfig(), adapted=False)
    step, inputs = run.step, batch(3)

    def loss(parameters):
        return step._loss_sums(parameters, *inputs.arrays())[0]

    def loss_of_weights(weights):
        step.model.update(tree_unflatten(list(weights.items())))
        logits = step.model(inputs.tokens[:, :-1])
        return cross_entropy_sum(logits, inputs.tokens[:, 1:], inputs.mask)

    step.materialize()
    quantized = {k: v for k, v in tree_flatten(step.model.trainable_parameters())}
    expected = mx.grad(loss_of_weights)(quantized)
    for name, gradient in mx.grad(loss)(step.parameters).items():
        assert mx.array_equal(gradient, expected[name]), name
        assert mx.abs(gradient).max() > 0


def test_adapter_gradients_equal_those_of_the_merged_weight(make_checkpoint):
    """Reference: y = x round(W0 + s (A B)^T)^T with a straight-through estimator."""
    folder = make_checkpoint(dtype="bfloat16")
    run = Run(folder, QuantizationConfig(), adapted=True)
    step = run.step
    path = "model.layers.0.mlp.down_proj"
    pair = [f"{path}.lora_a", f"{path}.lora_b"]
    step.parameters[pair[1]] = 0.1 * mx.random.normal(
        step.parameters[pair[1]].shape, key=mx.random.key(4)
    )
    x = mx.random.normal((3, 5, 256), key=mx.random.key(5))
    probe = mx.random.normal((3, 5, 128), key=mx.random.key(6))
    layer = lora_model.adapted_layers(step.model)[path]

    def product(parameters, x):
        step._set_weights(parameters)
        return (layer(x) * probe).sum()

    gradients, dx = mx.grad(product, argnums=(0, 1))(step.parameters, x)

    stored = run.loaded.dtype
    a, b = (np.array(step.parameters[name], dtype=np.float64) for name in pair)
    base = np.array(run.base[f"{path}.weight"].astype(mx.float32), dtype=np.float64)
    merged = mx.array(base + 2.0 * (a @ b).T, dtype=mx.float32)
    spec = run.plan.specs[path]
    served = dequantize(pack(merged, spec, stored), spec, stored).astype(mx.float32)
    rows = np.array(x, dtype=np.float64).reshape(-1, 256)
    errors = np.array(probe, dtype=np.float64).reshape(-1, 128)
    d_weight = errors.T @ rows
    close(gradients[pair[0]], 2.0 * d_weight.T @ b.T)
    close(gradients[pair[1]], 2.0 * a.T @ d_weight.T)
    close(dx.reshape(-1, 256), errors @ np.array(served, dtype=np.float64))
    # Negative control: the unquantized weight differs.
    assert np.abs(np.array(served) - np.array(merged)).max() > 1e-3


def close(value, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.array(value) / scale, expected / scale, atol=1e-5)
