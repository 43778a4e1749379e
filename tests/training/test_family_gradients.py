"""Gradients and causality of every architecture family, as lmx trains them.

Known faults elsewhere: experts without gradients (mlx-lm #1814, #1787), recurrent
layers with wrong gradients in all but the first sequence, padding masks that replaced
the causal mask, and float16 models with NaN gradients.
"""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.lora import LoRAConfig
from lmx.data.batching import Batch
from lmx.models.dtypes import set_compute_dtype
from lmx.models.loader import load
from lmx.models.lora import lora_model
from lmx.pipeline.estimate import training_dtype
from lmx.training.document_mask import DocumentCaches, PackingUnsupported
from tiny_families import EXPERTS, FAMILIES, VOCABULARY, alternating, config, member
from tiny_steps import gradients_of, make_step

pytestmark = [
    pytest.mark.slow,
    # The tiny configs have keys of several families.
    pytest.mark.filterwarnings("ignore:.*config.json"),
]

LENGTH, CUT = 24, 15
NUM_EXPERTS = EXPERTS["num_experts"]
MIXTURES = [family for family in FAMILIES if "expert" in str(config(family))]
HYBRIDS = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "mamba", "mamba2", "falcon_h1"),
    *("granitemoehybrid", "nemotron_h", "lfm2", "lfm2_moe", "jamba", "kimi_linear"),
    *("rwkv7", "recurrent_gemma", "plamo2", "olmo_hybrid", "bailing_hybrid"),
    *("minimax", "baichuan_m1"),
)


def random_tokens(sequences: int, length: int, *, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.integers(0, VOCABULARY, (sequences, length)).astype(np.int32)


def make_batch(tokens: np.ndarray, mask: np.ndarray | None = None, documents=None):
    if mask is None:
        mask = np.ones((len(tokens), tokens.shape[1] - 1), bool)
    arrays = mx.array(tokens), mx.array(mask)
    return Batch(*arrays, ("rows.jsonl:1",) * len(tokens), documents)


@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_of_every_expert_have_gradients(family):
    model = member(family)
    lora_model.attach(model, LoRAConfig(rank=2, target_modules=["*"]), seed=0)
    step = make_step(model, name="sgd")
    for path, value in step.parameters.items():
        if path.endswith("lora_b"):
            # At zero, where training starts, A has no gradient.
            noise = mx.random.normal(value.shape, key=mx.random.key(0))
            step.parameters[path] = 0.1 * noise
    by_path = gradients_of(step, make_batch(random_tokens(12, LENGTH)))
    # Adapters of experts are stacked: [experts, rank, in] and [experts, out, rank].
    stacked = {path: g for path, g in by_path.items() if g.ndim == 3}
    assert len(stacked) >= 4
    for path, gradient in stacked.items():
        assert len(gradient) == NUM_EXPERTS
        assert all(np.abs(expert).max() > 0 for expert in gradient), path


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("family", HYBRIDS)
def test_gradients_of_each_sequence_equal_finite_differences(family, row):
    tokens = random_tokens(2, LENGTH)
    mask = np.zeros((2, LENGTH - 1), bool)
    mask[row] = True
    batch = make_batch(tokens, mask)
    # All experts are active, as the loss jumps where the choice of experts changes.
    step, alone = (
        make_step(member(family, active_experts=NUM_EXPERTS), name="sgd")
        for _ in range(2)
    )
    start = dict(step.parameters)
    by_path = gradients_of(step, batch)
    expected = gradients_of(alone, make_batch(tokens[row : row + 1]))
    largest = max(np.abs(g).max() for g in expected.values())
    for path, gradient in by_path.items():
        error = np.abs(gradient - expected[path]).max()
        assert error <= 1e-4 * np.abs(expected[path]).max() + 1e-5 * largest, path
        assert_slope(step, start, path, gradient, batch)


def assert_slope(step, start, path, gradient, batch):
    """Compare with the loss on both sides, half along the gradient, half at random."""
    noise = np.random.default_rng(1).normal(size=gradient.shape)
    direction = noise / np.linalg.norm(noise)
    norm = np.linalg.norm(gradient)
    if norm:
        direction = direction + gradient / norm
    expected = (gradient * direction).sum()
    # Wide where the gradient is small, as that of decays: else the difference of the
    # losses would be lost in their rounding errors.
    width = np.clip(2e-4 / max(abs(expected), 1e-9), 1e-3, 1e-2)
    losses = []
    for sign in (1, -1):
        shift = mx.array(sign * width * direction, mx.float32)
        step.parameters.update(start | {path: start[path] + shift})
        loss, count, _ = step.evaluate([batch])
        losses.append(loss / count)
    step.parameters.update(start)
    slope = (losses[0] - losses[1]) / (2 * width)
    assert slope == pytest.approx(expected, rel=0.04, abs=1.5e-4), path


def loss_and_norm(loaded, compute, *, adapter=False) -> tuple[float, float]:
    """Of one step of a loaded checkpoint, cast as the training stage casts it."""
    model = loaded.model
    if adapter:
        lora_model.attach(model, LoRAConfig(rank=2), seed=0)
    step = make_step(model, compute_dtype=compute)
    set_compute_dtype(model, compute)
    loss, _, norm, *_ = step(make_batch(random_tokens(2, LENGTH)), 1e-3, 0)
    return loss.item(), norm.item()


@pytest.mark.parametrize(("family", "adapter"), alternating(False, True))
def test_families_train_float16_checkpoints(family, adapter, make_checkpoint):
    """Not in float16, in which small gradients vanish and large ones overflow."""
    folder = make_checkpoint(config(family), dtype="float16")
    loaded, exact = (load(folder, compute=name) for name in ("stored", "float32"))
    assert loaded.dtype == mx.float16
    compute = training_dtype("auto", loaded.dtype)
    result = loss_and_norm(loaded, compute, adapter=adapter)
    assert np.isfinite(result).all()
    assert min(result) > 0
    expected = loss_and_norm(exact, mx.float32, adapter=adapter)
    assert result == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_future_tokens_do_not_change_earlier_losses(family):
    """In full sequences, before padding, and in packed documents."""
    tokens = random_tokens(2, LENGTH)
    mask = np.zeros((2, LENGTH - 1), bool)
    # The target of position j is token j + 1.
    mask[:, : CUT - 1] = True
    changed, padded, earlier = tokens.copy(), tokens.copy(), tokens.copy()
    changed[:, CUT:] = (tokens[:, CUT:] + 1) % VOCABULARY
    padded[:, CUT:] = 0
    earlier[:, 0] = (tokens[:, 0] + 1) % VOCABULARY
    for is_packed in (False, True):
        # A compiled step leaves its traced weights in the model.
        model, document_caches, documents = member(family), None, None
        if is_packed:
            try:
                document_caches = DocumentCaches(model)
            except PackingUnsupported:
                continue
            # The second one continues at the cut: the mask must be causal within it.
            documents = mx.array(np.arange(LENGTH - 1)[None] >= CUT // 3)
            documents = mx.broadcast_to(documents, mask.shape).astype(mx.int32)
        step = make_step(model, document_caches=document_caches)
        loss, other, before_padding, control = (
            step.evaluate([make_batch(values, mask, documents)])[0]
            for values in (tokens, changed, padded, earlier)
        )
        assert other == pytest.approx(loss, rel=1e-6)
        assert before_padding == pytest.approx(loss, rel=1e-6)
        assert abs(control / loss - 1) > 1e-5
