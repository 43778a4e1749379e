"""Every optimizer compared with the one of MLX, or with a float64 reference."""

import mlx.core as mx
import mlx.optimizers as optimizers
import numpy as np
import pytest
from lmx.errors import UserError
from lmx.training import optimizers as lmx_optimizers
from lmx.training.dynamic_quantization import BLOCK_SIZE, DynamicCodes
from lmx.training.optimizers import MIN_8BIT_SIZE, OptimizerConfig, make_optimizer
from mlx.utils import tree_flatten
from test_dynamic_quantization import reference as dynamic_reference
from tiny_llamas import llama, tokens_of
from tiny_steps import make_step

NAMES = ("adamw", "adamw_8bit", "adafactor", "lion", "lion_8bit", "muon", "sgd")


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


@pytest.mark.parametrize("shape", [(8, 64), (64, 8)])
def test_muon_updates_have_the_size_of_adamw(shape):
    gradient = mx.random.normal(shape, key=mx.random.key(0))
    parameters = {"layers.0.w": mx.zeros(shape)}
    optimizer = new_optimizer("muon", parameters)
    optimizer.learning_rate = mx.array(1.0)
    updated = optimizer.apply_gradients({"layers.0.w": gradient}, parameters)
    size = mx.sqrt(mx.square(updated["layers.0.w"]).mean()).item()
    assert 0.12 < size < 0.28


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("adamw", "qat"), ("adafactor", "full"), ("sgd", "full"), ("lion", "full")),
        *(("adamw_8bit", "lora"), ("adamw_8bit", "full")),
        *(("lion_8bit", "lsq-qat"), ("muon", "lsq-qat")),
    ],
)
def test_optimizers_reduce_the_loss(name, mode):
    model, fake_quant = llama(mode)
    rate = 0.3 if name == "sgd" else 3e-3
    step = make_step(model, weight_transform=fake_quant, name=name, max_grad_norm=1.0)
    losses = []
    for seed in range(8):
        losses.append(step(tokens_of(), rate, seed)[0].item())
        mx.eval(step.parameters)
    assert losses[-1] < 0.97 * losses[0]
    state = dict(tree_flatten(step.optimizer.state))
    moments = [v for k, v in state.items() if k.rpartition(".")[2] != "step"]
    has_codes = "8bit" in name and mode != "lora"
    dtypes = {mx.float32, mx.uint8} if has_codes else {mx.float32}
    assert {v.dtype for v in moments} == dtypes
    assert {v.dtype for v in step.parameters.values()} == {mx.float32}


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


def float64_training(name, start, gradients, rate):
    """Adam or Lion in float64, whose moments are quantized after every step."""
    weights = start.astype(np.float64)
    m, v = np.zeros_like(weights), np.zeros_like(weights)
    for number, gradient in enumerate(gradients, 1):
        g = gradient.astype(np.float64)
        if name == "lion_8bit":
            weights = weights - rate * np.sign(0.9 * m + 0.1 * g)
            m = 0.95 * m + 0.05 * g
        else:
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
            root = np.sqrt(v / (1 - 0.95**number)) + 1e-8
            weights = weights - rate * m / (1 - 0.9**number) / root
            v = dynamic_reference(v, signed=False)[1]
        m = dynamic_reference(m, signed=True)[1]
    return weights, m, v


@pytest.mark.parametrize("name", ["adamw_8bit", "lion_8bit"])
def test_8_bit_optimizers_equal_a_float64_reference(name):
    generator = np.random.default_rng(0)
    shape = (20, 250)
    start = generator.normal(size=shape).astype(np.float32)
    scales = 10 ** generator.uniform(-3, 0, (1, 250))
    gradients = [
        (scales * generator.normal(size=shape)).astype(np.float32) for _ in range(5)
    ]
    parameters = {"w": mx.array(start)}
    optimizer = new_optimizer(name, parameters)
    for gradient in gradients:
        optimizer.learning_rate = mx.array(0.1)
        parameters = optimizer.apply_gradients({"w": mx.array(gradient)}, parameters)
    weights, m, v = float64_training(name, start, gradients, 0.1)
    # A value in the middle of two codes may get either, which changes later updates.
    differences = np.abs(np.array(parameters["w"]) - weights)
    assert np.mean(differences > 1e-5) < 2e-3
    state = optimizer.state["w"]
    assert np.mean(dequantized(state, "m") == 0) < 0.5
    for moment, expected in {"m": m, "v": v}.items():
        if moment in state:
            close = np.isclose(dequantized(state, moment), expected, 1e-4, 1e-12)
            assert np.mean(close) > 0.998
    float32, _, _ = float64_training(name, start, gradients[:1], 0.1)
    assert np.mean(np.abs(np.array(parameters["w"]) - float32) > 1e-2) > 0.5


def test_parts_of_a_large_parameter_are_updated_alike(monkeypatch):
    def trained():
        parameters = {"w": mx.zeros((70, 100))}
        optimizer = new_optimizer("adamw_8bit", parameters)
        for number in range(3):
            gradient = mx.random.normal((70, 100), key=mx.random.key(number))
            optimizer.learning_rate = mx.array(0.1)
            parameters = optimizer.apply_gradients({"w": gradient}, parameters)
        return parameters | optimizer.state["w"]

    whole = trained()
    monkeypatch.setattr(lmx_optimizers, "MAX_AT_ONCE", 10 * BLOCK_SIZE)
    parts = trained()
    assert whole.keys() == parts.keys()
    for key, value in whole.items():
        assert value.dtype == parts[key].dtype
        assert mx.array_equal(value, parts[key]), key


def dequantized(state: dict, name: str) -> np.ndarray:
    codes = DynamicCodes(state[name], state[f"{name}_absmax"])
    return np.array(lmx_optimizers.dequantize(codes, signed=name == "m"))


def test_8_bit_moments_take_a_quarter_and_small_ones_stay_float32():
    parameters = {"large": mx.zeros((64, 300)), "small": mx.zeros(MIN_8BIT_SIZE - 1)}
    state = new_optimizer("adamw_8bit", parameters).state
    expected = new_optimizer("adamw", parameters).state
    assert state["small"].keys() == expected["small"].keys()
    sizes = [
        sum(value.nbytes for value in moments["large"].values())
        for moments in (state, expected)
    ]
    assert sizes[0] / sizes[1] == (1 + 4 / 256) / 4


def test_blocks_in_two_shards_are_refused():
    def two_shards(rows):
        config = OptimizerConfig("adamw_8bit")
        shard = {"layers.0.w": mx.zeros((rows, 128))}
        sizes = {"layers.0.w": 2 * rows * 128}
        return make_optimizer(config, shard, block_prefix="layers.", sizes=sizes)

    # The size of the whole parameter decides: a checkpoint is that of one process.
    assert MIN_8BIT_SIZE > 24 * 128
    assert two_shards(24).state["layers.0.w"]["m_absmax"].shape == (12,)
    with pytest.raises(UserError, match=r"a shard of layers\.0\.w has 3200 values"):
        two_shards(25)
