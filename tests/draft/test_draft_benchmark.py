"""A draft learns the law of its target, and what is predicted of it comes true."""

from itertools import count

import mlx.core as mx
import numpy as np
import pytest
from lmx.data.tokenization import Example
from lmx.draft.acceptance import (
    ReferenceCompletion,
    all_acceptance_probs,
    predict_accepted_length,
    predict_accepted_lengths,
)
from lmx.draft.benchmark import DRAFT, PROMPT_LOOKUP, Candidate, DraftBenchmark
from lmx.draft.cost_model import SpeculationCosts
from lmx.draft.dataset import DistillationBatches
from lmx.draft.losses import DraftLoss, acceptance_bounds
from lmx.generation.engine import Generator
from lmx.generation.sampling import Sampling
from lmx.generation.speculative.decoder import SpeculativeStats
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.draft_model import DraftModelProposer
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
FREE = SpeculationCosts(tuple(1 + 0.05 * guesses for guesses in range(9)))


def law_of():
    """Logits of what follows a token, by token: [V, V]."""
    random = np.random.default_rng(0)
    return mx.array(3.0 * random.normal(size=(VOCABULARY, VOCABULARY)))


def lessons(top_k, *, texts=48, seed=0):
    """Texts drawn from the law, and its predictions."""
    law, random = law_of(), np.random.default_rng(seed)
    shares = np.array(mx.softmax(law, axis=-1)).astype(float)
    examples = []
    for number in range(texts):
        tokens = [int(random.integers(VOCABULARY))]
        for _ in range(16):
            now = shares[tokens[-1]]
            tokens.append(int(random.choice(VOCABULARY, p=now / now.sum())))
        mask = np.arange(17) > 3
        examples.append(Example(np.array(tokens, np.int32), mask, f"text {number}"))
    return DistillationBatches(
        examples,
        lambda tokens: law[tokens],
        key=f"law {seed}",
        max_seq_length=32,
        tokens=512,
        top_k=top_k,
        seed=0,
        logger=RunLogger(None, quiet=True),
    )


def student():
    mx.random.seed(1)
    model = build_model(LLAMA)
    mx.eval(model.parameters())
    return model


def overlap(model, held_out):
    """Bounds of the mean overlap, and the overlap over the whole vocabulary."""
    found = []
    for lesson in held_out:
        p = mx.softmax(law_of()[lesson.tokens[:, :-1]].astype(mx.float32), axis=-1)
        q = mx.softmax(model(lesson.tokens[:, :-1]), axis=-1)
        exact = mx.minimum(p, q).sum(axis=-1)
        mask = np.array(lesson.mask)
        bounds = (*acceptance_bounds(model, lesson), exact)
        found.append([np.array(value)[mask].mean() for value in bounds])
    return np.mean(found, axis=0)


def trained(loss, steps=80):
    taught, model = lessons(8), student()
    objective = DraftLoss(loss, cross_entropy=0.1)
    step = TrainStep(model, OptimizerConfig(max_grad_norm=1.0), teacher_loss=objective)
    for number in range(steps):
        step(taught(number), 1e-2, number)
        mx.eval(step.parameters, step.optimizer.state)
    return step.materialize()


def test_training_raises_acceptance_rate():
    held_out = lessons(8, seed=1)
    *_, before = overlap(student(), held_out)
    shares = {
        loss: overlap(trained(loss), held_out)
        for loss in ("forward_kl", "adaptive_kl_tv")
    }
    for low, high, exact in shares.values():
        assert exact > before + 0.2
        assert low - 1e-4 <= exact <= high + 1e-4
    assert shares["adaptive_kl_tv"][2] >= shares["forward_kl"][2] - 0.01


def test_distillation_targets_are_cached():
    calls, law = [], law_of()

    def counted(tokens):
        calls.append(tokens.shape)
        return law[tokens]

    examples = [Example(np.arange(9, dtype=np.int32), np.arange(9) > 2, "here")]
    settings = {"max_seq_length": 32, "tokens": 64, "top_k": 4, "seed": 0}
    logger = RunLogger(None, quiet=True)
    for _ in range(2):
        DistillationBatches(examples, counted, key="counted", logger=logger, **settings)
    assert len(calls) == 1
    DistillationBatches(
        examples, counted, key="another target", logger=logger, **settings
    )
    assert len(calls) == 2


class Wordless:
    """A tokenizer whose tokens have no text and end nothing."""

    eos_token_ids = ()
    last_segment = ""

    @property
    def detokenizer(self):
        return self

    def add_token(self, token):
        pass

    def finalize(self):
        pass


def noisy(model, amount):
    mx.random.seed(5)
    twin = build_model(model_config())
    twin.update(
        tree_map(lambda w: w + amount * mx.random.normal(w.shape), model.parameters())
    )
    mx.eval(twin.parameters())
    return twin


def model_config():
    sizes = {"vocab_size": 260, "max_position_embeddings": 400}
    return LLAMA | sizes | {"tie_word_embeddings": False}


# What is greedy is exact, and needs no many draws.
@pytest.mark.parametrize(("temperature", "count"), [(0.0, 3), (0.8, 8)])
def test_draft_benchmark_matches_predicted_accepted_length(temperature, count):
    mx.random.seed(3)
    target = build_model(model_config())
    target.lm_head.weight *= 25
    draft = noisy(target, 0.01)
    prompts = [[5, 9, 11, number] for number in range(count)]
    rival = Candidate(draft, FREE)
    trial = DraftBenchmark(target, rival, Wordless(), {"all": prompts}, max_tokens=70)
    sampling = Sampling(temperature=temperature, seed=4)
    found = trial.run(sampling)
    column = found.stats[DRAFT]
    assert 0.3 < column.acceptance_rate < 0.99
    assert 1 < column.accepted_length < found.num_draft_tokens + 1
    # Of draws so few are seen here that they vary by some percent; more are below.
    assert column.accepted_length == pytest.approx(
        found.predicted_accepted_length, rel=0.12 if temperature else 1e-9
    )
    assert found.stats[PROMPT_LOOKUP].speedup > 0
    assert found.predicted_speedup == FREE.speedup(
        found.predicted_accepted_length, found.num_draft_tokens
    )


def test_other_completions_predict_accepted_length():
    """As in training; the overlap of both laws without the temperature does not."""
    mx.random.seed(3)
    target = build_model(model_config())
    target.lm_head.weight *= 25
    draft = noisy(target, 0.01)
    # Flatter than the target: colder, both are more alike.
    draft.lm_head.weight *= 0.2
    prompts = [[5, 9, 11, number] for number in range(45)]
    cold, guesses = Sampling(temperature=0.6), 3
    texts = [
        ReferenceCompletion(target, *pair, cold)
        for pair in answered(prompts, target, 400)[0]
    ]
    curve = predict_accepted_lengths(all_acceptance_probs(texts, draft))
    draws = count()
    pairs, rounds = answered(
        prompts, target, 0, lambda: DraftModelProposer(draft, seed=next(draws)), guesses
    )
    # The last token of an answer may be no round's.
    said = sum(len(found) - 1 for _, found in pairs)
    measured = said / (rounds.rounds + rounds.standard_tokens)
    assert curve[guesses - 1] == pytest.approx(measured, rel=0.05)
    shared = [shares(target, draft, text.prompt, text.tokens) for text in texts]
    whole = predict_accepted_length(shared, guesses)
    assert whole != pytest.approx(measured, rel=0.05)


def answered(prompts, target, seed, propose=None, guesses=1):
    """Pairs of a prompt and what is said, and how its rounds went."""
    controller = DraftLengthController(max_draft_tokens=guesses, fixed=guesses)
    generator = Generator(
        target, Wordless(), make_proposer=propose, draft_length=controller
    )
    pairs, rounds = [], SpeculativeStats()
    for number, prompt in enumerate(prompts):
        sampling = Sampling(temperature=0.6, seed=seed + number)
        found = generator.generate(prompt, max_tokens=30, sampling=sampling)
        pairs.append((prompt, found.tokens))
        if propose:
            rounds.merge(generator.speculative_stats)
    return pairs, rounds


def shares(target, draft, prompt, said):
    """sum min(p, q) at every token but the first."""
    tokens = mx.array([[*prompt, *said]])[:, :-1]
    laws = [mx.softmax(model(tokens)[0], axis=-1) for model in (target, draft)]
    return np.array(mx.minimum(*laws).sum(axis=-1))[len(prompt) :].astype(float)


def test_acceptance_probs_of_target_itself_are_one():
    mx.random.seed(3)
    target = build_model(model_config())
    text = [7, 250, 3, 9, 9]
    for sampling in (Sampling(temperature=0.7), Sampling(temperature=1.0, top_p=1.0)):
        stands = ReferenceCompletion(target, [1, 2], text, sampling).acceptance_probs(
            target
        )
        assert np.allclose(stands, 1, atol=1e-5)
        assert predict_accepted_length([stands], 3) == pytest.approx(4, rel=1e-3)
