"""Full and adapter training of every architecture family of mlx-lm, in the compiled
step: code that needs a value while it is traced would raise."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.lora import LoRAConfig
from lmx.config.quant_spec import QuantizationConfig
from lmx.data.batching import Batch
from lmx.errors import UserError
from lmx.models.hooks import find_blocks
from lmx.models.loader import build_model
from lmx.models.lora import lora_model
from lmx.quantization.qat.fake_quant import FakeQuant
from lmx.quantization.target_layers import select_layers
from lmx.training.chunked_loss import ChunkedLossModel
from mlx.utils import tree_flatten
from tiny_families import FAMILIES, VOCABULARY, WINDOW, alternating, config, member
from tiny_steps import loss_and_gradients, make_step

pytestmark = pytest.mark.slow

LENGTH = 17
# The choice of experts or tokens has no gradient, nor has a constant.
CHOOSING = ("indexer.", "correction_bias", "expert_bias")
CONSTANT = {
    "apertus": ("act_fn.eps",),
    # The router's single selected score is a softmax over itself.
    "phimoe": ("block_sparse_moe.gate.weight",),
    # The last two layers take keys and values from earlier ones, through a cache.
    "gemma3n": tuple(
        f"layers.{index}.self_attn.{name}"
        for index in (2, 3)
        for name in ("k_proj", "k_norm", "v_proj")
    ),
}
SHARED_KEYS = ("gemma3n", "afm7")


@pytest.fixture(scope="module")
def batch():
    assert LENGTH > 2 * WINDOW
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, VOCABULARY, (3, LENGTH + 1)).astype(np.int32)
    mask = generator.random((3, LENGTH)) < 0.7
    return Batch(mx.array(tokens), mx.array(mask), ("rows.jsonl:1",) * 3)


def train(step, batch, *, rate, steps=4):
    """Losses per token of a few steps; every norm must be finite."""
    losses = []
    for seed in range(steps):
        loss, tokens, norm = (v.item() for v in step(batch, rate, seed)[:3])
        assert 0 < norm < np.inf
        losses.append(loss / tokens)
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_in_full(family, batch):
    step = make_step(member(family))
    before = dict(step.parameters)
    assert before.keys() == dict(tree_flatten(step.model.parameters())).keys()
    losses = train(step, batch, rate=4e-3)
    assert losses[-1] < losses[0] - 0.1
    exempt = CHOOSING + CONSTANT.get(family, ())
    unchanged = [k for k, v in step.parameters.items() if mx.array_equal(v, before[k])]
    assert [k for k in unchanged if not any(part in k for part in exempt)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_and_fuse_adapters(family, batch):
    model = member(family)
    base = dict(tree_flatten(model.parameters()))
    lora_model.attach(model, LoRAConfig(rank=2), seed=0)
    step = make_step(model)
    losses = train(step, batch, rate=1.5e-2)
    assert losses[-1] < losses[0] - 0.1
    unused = CONSTANT.get(family, ())
    idle = [k for k, v in step.parameters.items() if not mx.any(v != 0).item()]
    assert [k for k in idle if not any(part in k for part in unused)] == []
    trained, _, _ = step.evaluate([batch])
    plain = build_model(config(family))
    weights = lora_model.fuse(model, base, step.parameters, mx.float32)
    plain.load_weights(list(weights.items()))
    assert make_step(plain).evaluate([batch])[0] == pytest.approx(trained, rel=1e-4)


@pytest.mark.parametrize(("family", "mode"), alternating("full", "adapters"))
def test_families_train_with_fake_quantization(family, mode, batch):
    """The exported codes have the loss of quantization-aware training."""
    model = member(family)
    base = dict(tree_flatten(model.parameters()))
    specs = select_layers(model, QuantizationConfig(bits=4, group_size=32)).specs
    if mode == "adapters":
        lora_model.attach(model, LoRAConfig(rank=2), seed=0, merged=True)
    step = make_step(model, weight_transform=FakeQuant(model, specs, mx.float32))
    losses = train(step, batch, rate=5e-3 if mode == "full" else 2e-2, steps=3)
    assert losses[-1] < losses[0] - 0.05
    codes = step.weight_transform.export_tensors(step.parameters)
    weights = lora_model.fuse(model, base, step.parameters, mx.float32)
    for path, spec in specs.items():
        tensors = (codes[f"{path}.{name}"] for name in ("weight", "scales", "biases"))
        grid = (spec.group_size, spec.bits)
        weights[f"{path}.weight"] = mx.dequantize(*tensors, *grid)
    plain = build_model(config(family))
    plain.load_weights(list(weights.items()))
    trained = step.evaluate([batch])[0]
    assert make_step(plain).evaluate([batch])[0] == pytest.approx(trained, rel=1e-4)


def outputs(family, batch, *, chunk=None, **settings):
    model = member(family)
    chunked = ChunkedLossModel(model, chunk) if chunk else None
    step = make_step(model, name="sgd", loss_model=chunked, **settings)
    return loss_and_gradients(step, batch)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in SHARED_KEYS])
def test_families_have_equal_gradients_with_less_memory(family, batch, monkeypatch):
    loss, expected = outputs(family, batch)
    largest = max(np.abs(g).max() for g in expected.values())
    blocks, checkpoint = [], mx.checkpoint

    def counting(function):
        blocks.append(function)
        return checkpoint(function)

    monkeypatch.setattr(mx, "checkpoint", counting)
    checkpointed_loss, result = outputs(
        family, batch, gradient_checkpointing=True, chunk=7
    )
    assert checkpointed_loss == pytest.approx(loss, rel=1e-5)
    for path, gradient in expected.items():
        allowed = {"rtol": 1e-4, "atol": 1e-5 * largest}
        assert np.allclose(result[path], gradient, **allowed), path
    location = find_blocks(member(family))
    assert len(blocks) >= len(location.trunk[location.name])


SLIDING = [f for f in FAMILIES if config(f) != config(f, window=LENGTH)]


@pytest.mark.parametrize("family", SLIDING)
def test_families_use_sliding_windows_in_training(family, batch):
    """Control: the tests above cover the masks of sliding layers."""
    narrow, wide = (make_step(member(family, window=w)) for w in (WINDOW, LENGTH))
    losses = [step(batch, 0.0, 0)[0].item() for step in (narrow, wide)]
    assert abs(losses[0] / losses[1] - 1) > 1e-5


@pytest.mark.parametrize("family", SHARED_KEYS)
def test_checkpointing_refuses_keys_shared_through_a_cache(family, batch):
    """The last blocks read the cache of an earlier block."""
    train(make_step(member(family)), batch, rate=3e-3)
    with pytest.raises(UserError, match="share keys through a cache"):
        make_step(member(family), gradient_checkpointing=True)(batch, 1e-3, 0)


def test_step_refuses_models_that_evaluate_in_the_forward_pass(batch):
    """DBRX selects its experts with NumPy, which cannot be traced."""
    with pytest.raises(UserError, match=r"cannot be trained.*eval"):
        make_step(member("dbrx"))(batch, 1e-3, 0)


@pytest.mark.skipif(
    mx.metal.is_available(), reason="Metal runs the kernel in the forward pass"
)
def test_step_refuses_metal_kernels_on_the_cpu(batch):
    with pytest.raises(UserError, match=r"cannot be trained.*No Metal"):
        make_step(member("bitnet"))(batch, 1e-3, 0)


def test_step_refuses_adapters_on_layers_with_direct_weight_access(batch):
    """Gemma 3n clips the weights of its mixing layers in every forward pass."""
    model = member("gemma3n")
    lora_model.attach(
        model, LoRAConfig(rank=2, target_modules=["altup.prediction_coefs"]), seed=0
    )
    with pytest.raises(UserError, match="no attribute 'weight'") as caught:
        make_step(model)(batch, 1e-3, 0)
    assert "adapter.target_modules: auto" in caught.value.hint
