"""Packed sequences compared with their documents one by one."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.data.batching import Batch
from lmx.models import logit_errors
from lmx.training import document_mask
from lmx.training.chunked_loss import ChunkedLossModel
from lmx.training.document_mask import DocumentCaches, PackingUnsupported
from lmx.training.step import TrainStep
from tiny_families import WINDOW
from tiny_llamas import GRID_MODES, MODES, VOCABULARY, family, llama
from tiny_steps import make_step

LENGTHS = [[9, 15, 4], [21, 6]]
WIDTH = 31  # token slots of a packed sequence: 28 or 27 are filled


def documents_of(lengths=LENGTHS, *, seed=0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and mask of every document, sequence by sequence."""
    generator = np.random.default_rng(seed)
    result = []
    for length in (length for sequence in lengths for length in sequence):
        mask = generator.random(length) < 0.6
        mask[0], mask[-1] = False, True
        result.append((generator.integers(0, VOCABULARY, length), mask))
    return result


def packed(documents, lengths=LENGTHS) -> Batch:
    remaining = iter(documents)
    tokens = np.zeros((len(lengths), WIDTH), np.int32)
    trained = np.zeros((len(lengths), WIDTH), bool)
    document_ids = np.zeros((len(lengths), WIDTH), np.int32)
    for sequence, parts in enumerate(lengths):
        start = 0
        for document, length in enumerate(parts):
            span = slice(start, start + length)
            tokens[sequence, span], trained[sequence, span] = next(remaining)
            document_ids[sequence, span] = document
            start += length
        document_ids[sequence, start:] = len(parts)
    arrays = (tokens, trained[:, 1:], document_ids[:, :-1])
    tokens, mask, document_ids = map(mx.array, arrays)
    return Batch(tokens, mask, ("rows.jsonl:1",), document_ids)


def separate_batches(documents) -> list[Batch]:
    return [
        Batch(mx.array(tokens[None], mx.int32), mx.array(mask[None, 1:]), ())
        for tokens, mask in documents
    ]


def gradients(step: TrainStep, batch: Batch):
    (loss, *_), gradients = step._gradients(*batch.arrays(with_places=False))
    return loss, gradients


def assert_packing_is_exact(model, **settings):
    documents = documents_of()
    step = make_step(model, document_caches=DocumentCaches(model), **settings)
    step.model.train()
    loss, result = gradients(step, packed(documents))
    parts = [gradients(step, batch) for batch in separate_batches(documents)]
    assert loss.item() == pytest.approx(sum(p[0].item() for p in parts), rel=1e-5)
    assert result
    for name, gradient in result.items():
        expected = sum(part[1][name] for part in parts)
        allowed = 1e-4 * max(1.0, mx.abs(expected).max().item())
        assert mx.abs(gradient - expected).max().item() <= allowed, name


@pytest.mark.parametrize("mode", MODES + GRID_MODES)
def test_packed_loss_and_gradients_equal_separate_documents(mode):
    model, fake_quant = llama(mode)
    assert_packing_is_exact(model, weight_transform=fake_quant)


@pytest.mark.parametrize("name", ["qwen3", "phi3", "gemma3", "qwen3_moe"])
def test_packing_is_exact_for_several_architectures(name):
    model = family(name)
    model.freeze()
    model.layers[0].unfreeze()
    assert_packing_is_exact(model)


def test_packing_respects_sliding_windows():
    # A document has 21 tokens, the window 8.
    assert max(max(sequence) for sequence in LENGTHS) > 2 * WINDOW
    model = family("gemma3")
    tokens = mx.array(np.random.default_rng(0).integers(0, 300, (1, 40)))
    one = mx.zeros((1, 40), mx.int32)
    difference = model(tokens) - model(tokens, cache=DocumentCaches(model)(one))
    assert mx.abs(difference).max().item() < 1e-5


def test_packing_with_gradient_checkpointing_and_chunked_loss():
    model, _ = llama()
    assert_packing_is_exact(model, gradient_checkpointing=True)
    assert_packing_is_exact(model, loss_model=ChunkedLossModel(model, 16))


def test_packing_without_document_numbers_differs():
    model, _ = llama()
    step = make_step(model, document_caches=DocumentCaches(model))
    batch = packed(documents_of())
    merged = Batch(batch.tokens, batch.mask, batch.where)
    separated, joined = (gradients(step, b)[0].item() for b in (batch, merged))
    assert abs(separated - joined) > 1e-2 * separated


def test_packed_padding_changes_nothing():
    model, _ = llama()
    step = make_step(model, document_caches=DocumentCaches(model))
    batch = packed(documents_of())
    other = mx.where(mx.arange(WIDTH) >= 28, mx.array(7, mx.int32), batch.tokens)
    changed = Batch(other, batch.mask, (), batch.documents)
    (loss, result), (same, again) = gradients(step, batch), gradients(step, changed)
    assert loss.item() == same.item()
    assert all(mx.array_equal(result[k], again[k]).item() for k in result)


def test_compiled_step_trains_on_packed_sequences():
    model, _ = llama()
    step = make_step(model, document_caches=DocumentCaches(model))
    batch = packed(documents_of())
    before, _, _ = step.evaluate([batch])
    losses = [step(batch, 1e-2, seed)[0].item() for seed in range(5)]
    assert losses[0] == pytest.approx(before, rel=1e-5)
    assert losses[-1] < losses[0]
    window = [step([batch, batch], 1e-2, 9)[0].item() for _ in range(2)]
    assert window[0] < 2 * losses[-1]


def test_packing_refuses_models_that_mix_up_masks(monkeypatch):
    """Gemma 2 adds an axis for groups of heads, which mlx-lm's mask lacks."""
    from mlx_lm.models.gemma2 import Attention

    model = family("gemma2")
    DocumentCaches(model)
    monkeypatch.setattr(Attention, "__call__", Attention.__call__.__wrapped__)
    with pytest.raises(PackingUnsupported, match=r"broadcast|reshape|are off by"):
        DocumentCaches(model)


def test_packing_refuses_recurrent_states():
    with pytest.raises(PackingUnsupported, match="ArraysCache"):
        DocumentCaches(family("mamba"))


def test_packing_refuses_absolute_positions():
    with pytest.raises(PackingUnsupported, match="are off by"):
        DocumentCaches(family("gpt2"))


@pytest.mark.parametrize("num_layers", [2, 30])
def test_packing_is_verified_with_the_tolerance_of_bfloat16(num_layers, monkeypatch):
    model, _ = llama(num_hidden_layers=num_layers)
    model.set_dtype(mx.bfloat16)
    DocumentCaches(model)
    # Negative control: a mask that ignores the documents is refused.
    ignore_documents(monkeypatch)
    with pytest.raises(PackingUnsupported, match="are off by"):
        DocumentCaches(model)


def ignore_documents(monkeypatch):
    mask = document_mask._mask
    monkeypatch.setattr(
        document_mask,
        "_mask",
        lambda documents, size: mask(mx.zeros_like(documents), size),
    )


class Rounded(nn.Module):
    """A model whose logits are rounded as a GPU rounds the factors of products."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def __call__(self, *args, **kwargs):
        logits = self.model(*args, **kwargs)
        return logits * mx.random.uniform(1 - 1e-3, 1 + 1e-3, logits.shape)

    @property
    def layers(self):
        return self.model.layers


def test_float32_is_exact_where_products_are(monkeypatch):
    model = Rounded(llama()[0])
    monkeypatch.setattr(logit_errors, "multiplies_exactly", lambda: True)
    with pytest.raises(PackingUnsupported, match="are off by"):
        DocumentCaches(model)
    monkeypatch.setattr(logit_errors, "multiplies_exactly", lambda: False)
    DocumentCaches(model)
    ignore_documents(monkeypatch)
    with pytest.raises(PackingUnsupported, match="are off by"):
        DocumentCaches(model)
