"""Distillation in a step: chunks and accumulation keep loss and gradients."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.train import TeacherConfig
from lmx.models.cross_entropy import cross_entropy_sum
from lmx.training.chunked_loss import ChunkedLossModel
from lmx.training.distillation import (
    DistillationLoss,
    OnlineTeacher,
    divergence_sum,
)
from lmx.training.document_mask import DocumentCaches
from lmx.training.teacher_targets import compress_targets, full_targets
from test_document_mask import documents_of, packed, separate_batches
from tiny_llamas import VOCABULARY, llama, tokens_of
from tiny_steps import Tiny, loss_and_gradients, make_step, random_batch

LOSSES = ("forward_kl", "reverse_kl")


def teacher_model(**changes):
    """A model with other weights than `llama`."""
    model, _ = llama(hidden_size=32, intermediate_size=32, **changes)
    return model


def distillation_loss(teacher=None, **settings):
    return DistillationLoss(
        TeacherConfig(**settings), teacher and OnlineTeacher(teacher)
    )


def gradients(loss, *batches, mode="full", chunk=None, **settings):
    """The summed loss and the mean gradients of one step."""
    model, fake_quant = llama(mode)
    chunked = ChunkedLossModel(model, chunk) if chunk else None
    if settings.pop("packing", False):
        settings["document_caches"] = DocumentCaches(model)
        if loss.online:
            loss.online.document_caches = DocumentCaches(loss.online.model)
    settings |= {"weight_transform": fake_quant, "name": "sgd", "loss_model": chunked}
    step = make_step(model, loss=loss, **settings)
    return loss_and_gradients(step, list(batches))


def assert_alike(result, expected, tolerance=1e-5):
    assert result[0] == pytest.approx(expected[0], rel=tolerance)
    assert any(np.abs(gradient).max() > 1e-4 for gradient in expected[1].values())
    for path, gradient in expected[1].items():
        allowed = tolerance * max(0.1, np.abs(gradient).max())
        np.testing.assert_allclose(result[1][path], gradient, rtol=0, atol=allowed)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_distillation_with_chunks_checkpointing_and_accumulation(divergence):
    settings = {"loss": divergence, "temperature": 2.0, "ce_weight": 0.25}
    batch = tokens_of(4)
    halves = [replace(batch, tokens=batch.tokens[i::2]) for i in (0, 1)]
    halves = [replace(h, mask=batch.mask[i::2]) for i, h in enumerate(halves)]
    expected = gradients(distillation_loss(teacher_model(), **settings), batch)
    for options in (
        {"chunk": 7},
        {"chunk": 7, "gradient_checkpointing": True},
        {"batches": halves},
    ):
        batches = options.pop("batches", [batch])
        result = gradients(
            distillation_loss(teacher_model(), **settings), *batches, **options
        )
        assert_alike(result, expected)


@pytest.mark.parametrize("chunk", [None, 8])
def test_distillation_of_packed_documents_equals_separate_ones(chunk):
    documents = documents_of()
    result = gradients(
        distillation_loss(teacher_model()), packed(documents), packing=True, chunk=chunk
    )
    assert_alike(
        result,
        gradients(distillation_loss(teacher_model()), *separate_batches(documents)),
    )
    # Control: a teacher that attends across documents gives another loss.
    blind = gradients(
        distillation_loss(teacher_model()), replace(packed(documents), documents=None)
    )
    assert abs(blind[0] - result[0]) > 1e-3 * result[0]


@pytest.mark.parametrize(
    ("divergence", "chunk"), [*((loss, None) for loss in LOSSES), ("forward_kl", 7)]
)
def test_offline_targets_of_all_tokens_equal_the_online_teacher(divergence, chunk):
    teacher, batch = teacher_model(), tokens_of()
    settings = {"loss": divergence, "temperature": 1.5}
    online = gradients(distillation_loss(teacher, **settings), batch, chunk=chunk)
    target = compress_targets(teacher(batch.tokens[:, :-1]), VOCABULARY, 1.5)
    cached = replace(batch, target=tuple(target))
    settings |= {"offline": True, "top_k": VOCABULARY}
    assert_alike(gradients(distillation_loss(**settings), cached, chunk=chunk), online)


@pytest.mark.parametrize("mode", ["full", "lora", "lora-qat", "lsq-qat"])
def test_distillation_of_quantized_and_adapted_students(mode):
    batch = tokens_of()
    expected = gradients(distillation_loss(teacher_model()), batch, mode=mode)
    assert_alike(
        gradients(distillation_loss(teacher_model()), batch, mode=mode, chunk=5),
        expected,
    )


def test_ce_weight_mixes_the_losses():
    batch, teacher = tokens_of(), teacher_model()
    pure = gradients(distillation_loss(teacher), batch)[0]
    model, _ = llama()
    plain = cross_entropy_sum(
        model(batch.tokens[:, :-1]), batch.tokens[:, 1:], batch.mask
    ).item()
    mixed = gradients(distillation_loss(teacher, ce_weight=0.25), batch)[0]
    assert mixed == pytest.approx(0.75 * pure + 0.25 * plain, rel=1e-5)


def test_the_squared_temperature_keeps_the_size_of_the_gradients():
    batch, teacher = tokens_of(), teacher_model()
    found = gradients(distillation_loss(teacher, temperature=3.0), batch)[0]
    model, _ = llama()
    logits, target = (m(batch.tokens[:, :-1]) for m in (model, teacher))
    target = full_targets(target, 3.0)
    divergence = divergence_sum(logits, target, batch.mask, temperature=3.0)
    assert found == pytest.approx(9 * divergence.item(), rel=1e-5)


@pytest.mark.parametrize(("chunk", "cached"), [(None, False), (5, True)])
def test_evaluation_loss_equals_training_loss(chunk, cached):
    batch, teacher = tokens_of(), teacher_model()
    loss = distillation_loss(teacher, temperature=2.0, ce_weight=0.25)
    expected = gradients(loss, batch)[0]
    if cached:
        logits = teacher(batch.tokens[:, :-1])
        target = compress_targets(logits, VOCABULARY, temperature=2.0)
        batch, loss.online = replace(batch, target=tuple(target)), None
    model, _ = llama()
    step = make_step(
        model, loss=loss, loss_model=chunk and ChunkedLossModel(model, chunk)
    )
    total, tokens, _ = step.evaluate([batch, batch])
    assert total == pytest.approx(2 * expected, rel=1e-5)
    assert tokens == 2 * batch.mask.sum().item()


def test_distillation_with_a_larger_padded_vocabulary():
    """Only tokens of both vocabularies are compared; padding is ignored."""
    batch, teacher = tokens_of(), teacher_model()
    wider = teacher_model(vocab_size=VOCABULARY + 32)
    same = teacher.parameters()
    embedding = wider.model.embed_tokens.weight
    embedding[:VOCABULARY] = same["model"]["embed_tokens"]["weight"]
    same["model"]["embed_tokens"]["weight"] = embedding
    wider.update(same)
    expected = gradients(distillation_loss(teacher), batch)
    assert_alike(gradients(distillation_loss(wider), batch, chunk=7), expected)


def test_online_teacher_without_split_returns_logits():
    batch = random_batch()
    teacher = OnlineTeacher(Tiny())
    assert teacher.hidden(batch.tokens).shape == (3, 8, 11)
    assert mx.array_equal(
        teacher.logits(teacher.hidden(batch.tokens)[0]), Tiny()(batch.tokens)[0]
    )
