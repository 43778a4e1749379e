"""QA-LoRA: adapters of a quantized model that its biases absorb."""

import itertools

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from lmx.config.lora import LoRAConfig
from lmx.config.quant_spec import QuantSpec
from lmx.data.batching import Batch
from lmx.errors import UserError
from lmx.models.loader import load, set_compute_dtype
from lmx.models.lora import io, lora_model
from lmx.pipeline.context import write_model
from lmx.quantization.dequantize import layer_specs, packed_layers
from lmx.quantization.packing import pack
from lmx.quantization.qat.fake_quant import QALoRAWeights
from lmx.quantization.target_layers import QuantizationPlan
from lmx.training.step import TrainStep
from mlx.utils import tree_flatten

AFFINE = itertools.product((2, 3, 4, 5, 6, 8), (32, 64, 128))
SPECS = [QuantSpec(bits=bits, group_size=group) for bits, group in AFFINE]
SPECS += [QuantSpec(mode="mxfp4"), None, SPECS[0]]
MIXED, DENSE = "model.layers.2.self_attn.k_proj", "model.layers.2.self_attn.v_proj"
NAMES = ["mlp.gate", "mlp.up", "mlp.down", *(f"self_attn.{x}" for x in "qokv")]
PATHS = [f"model.layers.{i}.{name}_proj" for i in range(3) for name in NAMES]
PATHS[-3:] = [MIXED, DENSE, PATHS[-3]]
TOKENS = mx.random.randint(0, 320, (2, 12), key=mx.random.key(0))
ADAPTER = LoRAConfig(type="qa_lora", rank=4, alpha=6.0, target_modules=["*"])


@pytest.fixture(scope="module", params=["float32", "float16", "bfloat16"])
def folder(request, make_checkpoint, tmp_path_factory):
    """A checkpoint with every affine grid, an mxfp4 layer and a dense layer."""
    settings = {"num_hidden_layers": 3, "attention_bias": True}
    loaded = load(make_checkpoint(dtype=request.param, **settings), compute="stored")
    weights = dict(tree_flatten(loaded.model.parameters()))
    specs = {p: s for p, s in zip(PATHS, SPECS, strict=True) if s}
    packed = {
        f"{path}.{name}": value
        for path, spec in specs.items()
        for name, value in pack(weights[f"{path}.weight"], spec, loaded.dtype).items()
    }
    target = tmp_path_factory.mktemp("coded") / request.param
    write_model(target, loaded, weights, QuantizationPlan(specs, {}), packed)
    return target


class Run:
    """Training with the setup of the train stage."""

    def __init__(self, folder, compute=mx.float32):
        self.loaded = load(folder, compute="stored")
        self.model = self.loaded.model
        self.base = dict(tree_flatten(self.model.parameters()))
        self.specs, self.packed = layer_specs(self.model), packed_layers(self.model)
        self.keys = lora_model.attach(self.model, ADAPTER, seed=1)
        self.biases = QALoRAWeights(self.model, self.packed)
        self.step = TrainStep(self.model, compute_dtype=compute, fake_quant=self.biases)
        set_compute_dtype(self.model, compute)

    def train(self, steps=2):
        mask = mx.ones((2, 11), dtype=mx.bool_)
        for seed in range(steps):
            mx.eval(self.step(Batch(TOKENS, mask, ("", "")), 0.02, seed))

    def export(self, target):
        stored = self.biases.export_tensors(self.step.parameters)
        dense = {k: v for k, v in self.base.items() if k not in stored}
        dense |= {f"{path}.weight": None for path in self.specs}
        write_model(
            target, self.loaded, dense, QuantizationPlan(self.specs, {}), stored
        )
        return target


@pytest.mark.parametrize("compute", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
def test_exported_checkpoint_has_the_training_logits(folder, tmp_path, compute):
    """The logits are equal bit for bit. Codes and sizes are those of the base."""
    run = Run(folder, compute)
    before = run.step.materialize()(TOKENS)
    run.train()
    after = run.step.materialize()(TOKENS)
    assert mx.abs(after - before).max().item() > 0.02
    target = run.export(tmp_path / "out")
    exported = load(target, compute="stored")
    set_compute_dtype(exported.model, compute)
    assert mx.array_equal(exported.model(TOKENS), after)
    base_model = load(folder, compute="stored")
    set_compute_dtype(base_model.model, compute)
    assert mx.array_equal(base_model.model(TOKENS), before)
    base_tensors, exported_tensors = (
        mx.load(str(f / "model.safetensors")) for f in (folder, target)
    )
    changed = {
        k for k, v in base_tensors.items() if not mx.array_equal(v, exported_tensors[k])
    }
    adapted = {p for p in run.specs if p != MIXED}
    assert changed == {f"{path}.biases" for path in adapted}
    assert {k: (v.dtype, v.shape) for k, v in base_tensors.items()} == {
        k: (v.dtype, v.shape) for k, v in exported_tensors.items()
    }


def test_stock_mlx_lm_has_the_training_logits(folder, tmp_path):
    run = Run(folder)
    run.train()
    target = run.export(tmp_path / "out")
    before, after = (mlx_lm.load(str(checkpoint))[0] for checkpoint in (folder, target))
    before.set_dtype(mx.float32)
    after.set_dtype(mx.float32)
    trained = run.step.materialize()(TOKENS)
    assert mx.allclose(after(TOKENS), trained, rtol=1e-4, atol=1e-4)
    assert not mx.allclose(before(TOKENS), trained, rtol=1e-2, atol=1e-2)


def test_save_adapter_writes_lora(folder, tmp_path):
    run = Run(folder)
    run.train()
    layers = lora_model.adapted_layers(run.model)
    io.save_adapter(
        tmp_path,
        run.step.parameters,
        layers=layers,
        adapter=ADAPTER,
        keys=run.keys,
        num_layers=3,
    )
    tensors = mx.load(str(tmp_path / "adapters.safetensors"))
    for path, layer in layers.items():
        trained = {n: run.step.parameters[f"{path}.{n}"] for n in layer.TRAINABLE}
        weight = mx.dequantize(
            *(
                run.packed[path][name].astype(t)
                for name, t in (
                    ("weight", mx.uint32),
                    ("scales", mx.float32),
                    ("biases", mx.float32),
                )
            ),
            group_size=layer.linear.group_size,
            bits=layer.linear.bits,
        )
        product = tensors[f"{path}.lora_a"] @ tensors[f"{path}.lora_b"]
        expected = weight + 1.5 * product.T
        assert mx.allclose(layer.merge(weight, trained), expected, atol=1e-6)
        biases = layer.merge_biases(trained).astype(mx.float32)
        change = biases - run.packed[path]["biases"].astype(mx.float32)
        # The first column of a group holds its update, up to the rounding of the bias.
        tolerance = mx.finfo(run.loaded.dtype).eps * mx.abs(biases).max().item()
        update = 1.5 * product.T[:, :: layer.linear.group_size]
        assert mx.abs(change - update).max().item() <= tolerance


def test_stock_mlx_lm_loads_saved_qa_lora(make_checkpoint, tmp_path):
    """The logits on the quantized base are equal up to rounding."""
    loaded = load(make_checkpoint(dtype="float32"), compute="stored")
    weights = dict(tree_flatten(loaded.model.parameters()))
    specs = {f"model.layers.0.{n}_proj": QuantSpec(bits=4) for n in NAMES}
    packed = {
        f"{path}.{name}": value
        for path, spec in specs.items()
        for name, value in pack(weights[f"{path}.weight"], spec, mx.float32).items()
    }
    folder = tmp_path / "coded"
    write_model(folder, loaded, weights, QuantizationPlan(specs, {}), packed)
    run = Run(folder)
    run.train()
    io.save_adapter(
        tmp_path,
        run.step.parameters,
        layers=lora_model.adapted_layers(run.model),
        adapter=ADAPTER,
        keys=run.keys,
        num_layers=1,
    )
    stock, _ = mlx_lm.load(str(folder), adapter_path=str(tmp_path))
    actual = run.step.materialize()(TOKENS)
    assert mx.allclose(stock(TOKENS), actual, rtol=1e-4, atol=1e-4)
    base_model, _ = mlx_lm.load(str(folder))
    assert not mx.allclose(base_model(TOKENS), actual, rtol=1e-2, atol=1e-2)


def test_gradients_equal_those_of_the_biases(folder):
    """The reference is float64. The gradient of x uses the forward weight."""
    run = Run(folder)
    path = "model.layers.0.mlp.down_proj"
    pair = [f"{path}.lora_a", f"{path}.lora_b"]
    parameters = run.step.parameters
    parameters[pair[1]] = 0.1 * mx.random.normal((4, 128), key=mx.random.key(4))
    x = mx.random.normal((3, 5, 256), key=mx.random.key(5))
    probe = mx.random.normal((3, 5, 128), key=mx.random.key(6))
    layer = lora_model.adapted_layers(run.model)[path].train()

    def product(parameters, x):
        run.step._set_weights(parameters)
        return (layer(x) * probe).sum()

    gradients, dx = mx.grad(product, argnums=(0, 1))(parameters, x)
    a, b = (np.array(parameters[name], dtype=np.float64) for name in pair)
    group = layer.linear.group_size
    rows = np.array(x, dtype=np.float64).reshape(15, -1, group).sum(axis=-1)
    errors = np.array(probe, dtype=np.float64).reshape(15, 128)
    d_biases = errors.T @ rows
    close(gradients[pair[0]], 1.5 * d_biases.T @ b.T)
    close(gradients[pair[1]], 1.5 * a.T @ d_biases.T)
    run.step._set_weights(parameters)
    forward_weight = mx.dequantize(
        *(layer.linear[n] for n in ("weight", "scales", "biases")),
        group_size=group,
        bits=layer.linear.bits,
    )
    close(dx.reshape(15, 256), errors @ np.array(forward_weight, dtype=np.float64))


def test_attach_refuses_a_model_without_codes(make_checkpoint):
    with pytest.raises(UserError, match="no layer that qa_lora adapts"):
        lora_model.attach(load(make_checkpoint()).model, ADAPTER, seed=0)


def close(value, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.array(value) / scale, expected / scale, atol=1e-5)
