"""A draft learns its target's distribution, and the predicted lengths are measured."""

from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest
from lmx.data.tokenization import Example
from lmx.draft.acceptance import ReferenceCompletion, predict_accepted_length
from lmx.draft.benchmark import DRAFT, PROMPT_LOOKUP, DraftBenchmark
from lmx.draft.candidates import ModelCandidate
from lmx.draft.cost_model import SpeculationCosts
from lmx.draft.dataset import DistillationBatches
from lmx.draft.losses import DraftLoss, acceptance_bounds
from lmx.generation.generator import Generator
from lmx.generation.sampling import Sampling
from lmx.models.loader import build_model
from lmx.run.logger import RunLogger
from lmx.training.optimizers import OptimizerConfig
from lmx.training.step import TrainStep
from mlx.utils import tree_map

VOCABULARY = 24
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
}
FREE = SpeculationCosts(
    tuple(1 + 0.05 * num_draft_tokens for num_draft_tokens in range(9))
)


def next_token_logits():
    """Logits of the next token, by token: [V, V]."""
    rng = np.random.default_rng(0)
    return mx.array(3.0 * rng.normal(size=(VOCABULARY, VOCABULARY)))


def distillation_batches(top_k, *, num_texts=48, seed=0):
    """Texts sampled from the table, with its predictions."""
    logits_table, rng = next_token_logits(), np.random.default_rng(seed)
    probs = np.array(mx.softmax(logits_table, axis=-1)).astype(float)
    examples = []
    for number in range(num_texts):
        tokens = [int(rng.integers(VOCABULARY))]
        for _ in range(16):
            weights = probs[tokens[-1]]
            tokens.append(int(rng.choice(VOCABULARY, p=weights / weights.sum())))
        mask = np.arange(17) > 3
        examples.append(Example(np.array(tokens, np.int32), mask, f"text {number}"))
    return DistillationBatches(
        examples,
        lambda tokens: logits_table[tokens],
        key=f"table {seed}",
        max_seq_length=32,
        tokens=512,
        top_k=top_k,
        seed=0,
        logger=RunLogger(None, quiet=True),
    )


def draft_model():
    mx.random.seed(1)
    model = build_model(LLAMA)
    mx.eval(model.parameters())
    return model


def overlap(model, held_out):
    """Bounds of the mean overlap, and the exact mean overlap."""
    result = []
    for batch in held_out:
        p = mx.softmax(
            next_token_logits()[batch.tokens[:, :-1]].astype(mx.float32), axis=-1
        )
        q = mx.softmax(model(batch.tokens[:, :-1]), axis=-1)
        exact = mx.minimum(p, q).sum(axis=-1)
        mask = np.array(batch.mask)
        bounds = (*acceptance_bounds(model, batch), exact)
        result.append([np.array(value)[mask].mean() for value in bounds])
    return np.mean(result, axis=0)


def trained(steps=50):
    batches, model = distillation_batches(8), draft_model()
    objective = DraftLoss(cross_entropy=0.1)
    step = TrainStep(model, OptimizerConfig(max_grad_norm=1.0), loss=objective)
    for number in range(steps):
        step(batches(number), 1e-2, number)
        mx.eval(step.parameters, step.optimizer.state)
    return step.materialize()


def test_training_raises_acceptance_rate():
    held_out = distillation_batches(8, seed=1)
    *_, before = overlap(draft_model(), held_out)
    low, high, exact = overlap(trained(), held_out)
    assert exact > before + 0.2
    assert low - 1e-4 <= exact <= high + 1e-4


class NullTokenizer:
    """A tokenizer without text and without end-of-sequence tokens."""

    eos_token_ids = ()
    added_tokens_decoder: ClassVar[dict] = {}

    def decode(self, tokens, **_):
        return ""


def noisy(model, amount):
    mx.random.seed(5)
    noisy_copy = build_model(model_config())
    noisy_copy.update(
        tree_map(lambda w: w + amount * mx.random.normal(w.shape), model.parameters())
    )
    mx.eval(noisy_copy.parameters())
    return noisy_copy


def model_config():
    sizes = {"vocab_size": 260, "max_position_embeddings": 400}
    return LLAMA | sizes | {"tie_word_embeddings": False}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_draft_benchmark_matches_predicted_accepted_length(temperature):
    mx.random.seed(3)
    target = build_model(model_config())
    target.lm_head.weight *= 25
    draft = noisy(target, 0.01)
    prompts = [[5, 9, 11, number] for number in range(3)]
    benchmark = DraftBenchmark(
        target,
        ModelCandidate(draft),
        FREE,
        NullTokenizer(),
        {"all": prompts},
        max_tokens=70,
    )
    sampling = Sampling(temperature=temperature, seed=4)
    result = benchmark.run(sampling)
    stats = result.stats[DRAFT]
    assert 0.3 < stats.acceptance_rate < 0.99
    assert 1 < stats.accepted_length < result.num_draft_tokens + 1
    # The draft model has the noise of the completions, so the prediction is exact.
    assert stats.accepted_length == pytest.approx(result.predicted_accepted_length)
    assert result.stats[PROMPT_LOOKUP].speedup > 0
    assert result.predicted_speedup == FREE.speedup(
        result.predicted_accepted_length, result.num_draft_tokens
    )


def test_predictions_need_the_noise_of_the_completions():
    """The control: with another seed, no completion is sampled from a perfect draft."""
    mx.random.seed(3)
    target = build_model(model_config())
    sampling = Sampling(temperature=0.9, seed=2)
    for draft in (target, noisy(target, 0.01)):
        generator = Generator(target, NullTokenizer())
        result = generator.generate([1, 2], max_tokens=40, sampling=sampling)
        rates = [
            ModelCandidate(draft)
            .acceptance_probs(ReferenceCompletion(target, [1, 2], result.tokens, each))[
                :, 0
            ]
            .mean()
            for each in (sampling, Sampling(temperature=0.9, seed=3))
        ]
        assert rates[0] > rates[1] + 0.3
        assert rates[1] < 0.2


def test_acceptance_probs_of_target_itself_are_one():
    mx.random.seed(3)
    target = build_model(model_config())
    generator = Generator(target, NullTokenizer())
    for sampling in (Sampling(temperature=0.7), Sampling(temperature=1.0, top_p=0.9)):
        result = generator.generate([1, 2], max_tokens=8, sampling=sampling)
        completion = ReferenceCompletion(target, [1, 2], result.tokens, sampling)
        probs = ModelCandidate(target).acceptance_probs(completion)
        assert np.allclose(probs[:, 0], 1, atol=1e-5)
        # No draft token is accepted past the end.
        assert probs[-1, 1:].tolist() == [0] * (probs.shape[1] - 1)
        assert predict_accepted_length([probs], 3) == pytest.approx(4, rel=1e-3)
