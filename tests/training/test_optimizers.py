"""Every optimizer compared with the one of MLX."""

import mlx.core as mx
import mlx.optimizers as optimizers
import numpy as np
import pytest
from lmx.training.optimizers import OptimizerConfig, make_optimizer
from mlx.utils import tree_flatten
from tiny_llamas import llama, tokens_of
from tiny_steps import make_step

NAMES = ("adamw", "adafactor", "lion", "muon", "sgd")


def new_optimizer(name, parameters):
    config = OptimizerConfig(name, beta1=0.9, beta2=0.95, momentum=0.8)
    return make_optimizer(config, parameters, block_prefix="layers.")


REFERENCES = {
    "adamw": lambda: optimizers.Adam(0.1, [0.9, 0.95], bias_correction=True),
    "adafactor": lambda: optimizers.Adafactor(
        0.1, scale_parameter=False, relative_step=False
    ),
    "lion": lambda: optimizers.Lion(0.1, [0.9, 0.95]),
    "sgd": lambda: optimizers.SGD(0.1, 0.8),
}
SHAPES = {"head.weight": (5, 3), "layers.0.w": (4, 6), "layers.0.norm": (4,)}


def values(seed):
    generator = np.random.default_rng(seed)
    return {k: mx.array(generator.normal(size=s)) for k, s in SHAPES.items()}


def run(optimizer, steps=3):
    parameters = values(0)
    for seed in range(1, steps + 1):
        optimizer.learning_rate = mx.array(0.1)
        parameters = optimizer.apply_gradients(values(seed), parameters)
    return parameters


@pytest.mark.parametrize("name", REFERENCES)
def test_optimizers_equal_mlx(name):
    result = run(new_optimizer(name, values(0)))
    expected = run(REFERENCES[name]())
    for path in SHAPES:
        np.testing.assert_allclose(result[path], expected[path], rtol=1e-5, atol=1e-6)


def test_muon_updates_block_matrices_and_adamw_everything_else():
    result = run(new_optimizer("muon", values(0)))
    adamw = run(REFERENCES["adamw"]())
    muon = run(optimizers.Muon(0.1, 0.8, weight_decay=0.0))
    for path in ("head.weight", "layers.0.norm"):
        np.testing.assert_allclose(result[path], adamw[path], rtol=1e-5)
    start = values(0)["layers.0.w"]
    # Like MLX, but scaled to an RMS of 0.2: 0.2 * sqrt(6) for a 4 x 6 matrix.
    np.testing.assert_allclose(
        result["layers.0.w"] - start,
        (muon["layers.0.w"] - start) * 0.2 * 6**0.5,
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize("shape", [(8, 64), (64, 8), (16, 16)])
def test_muon_updates_have_the_size_of_adamw(shape):
    gradient = mx.random.normal(shape, key=mx.random.key(0))
    parameters = {"layers.0.w": mx.zeros(shape)}
    optimizer = new_optimizer("muon", parameters)
    optimizer.learning_rate = mx.array(1.0)
    updated = optimizer.apply_gradients({"layers.0.w": gradient}, parameters)
    size = mx.sqrt(mx.square(updated["layers.0.w"]).mean()).item()
    assert 0.12 < size < 0.28


@pytest.mark.parametrize("mode", ["full", "lora", "qat", "lsq-qat"])
@pytest.mark.parametrize("name", NAMES)
def test_optimizers_reduce_the_loss(name, mode):
    model, fake_quant = llama(mode)
    rate = 0.3 if name == "sgd" else 3e-3
    step = make_step(model, fake_quant=fake_quant, name=name, max_grad_norm=1.0)
    losses = []
    for seed in range(8):
        losses.append(step(tokens_of(), rate, seed)[0].item())
        mx.eval(step.parameters)
    assert losses[-1] < 0.97 * losses[0]
    state = dict(tree_flatten(step.optimizer.state))
    moments = [v for k, v in state.items() if k.rpartition(".")[2] != "step"]
    assert all(v.dtype == mx.float32 for v in [*step.parameters.values(), *moments])


def test_weight_decay_is_equal_for_all_optimizers():
    for name in NAMES:
        step = make_step(llama()[0], name=name, weight_decay=0.5)
        other = make_step(llama()[0], name=name)
        before = other.parameters["model.layers.0.mlp.up_proj.weight"]
        for one in (step, other):
            mx.eval(one(tokens_of(), 0.1, 0), one.parameters)
        path = "model.layers.0.mlp.up_proj.weight"
        np.testing.assert_allclose(
            other.parameters[path] - step.parameters[path],
            0.1 * 0.5 * before,
            atol=1e-5,
        )
