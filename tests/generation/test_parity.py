"""The parity check between speculative and standard decoding."""

import mlx.core as mx
import pytest
from lmx.evaluation.parity import check_parity
from lmx.generation.engine import Engine
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sampling import Sampling
from lmx.generation.sequence import GenerationRequest
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.draft_model import DraftModelBatch, DraftModelProposer
from tiny_generators import tiny
from tiny_requests import run

pytestmark = pytest.mark.fused

PROMPT = [5, 9, 200, 31, 5, 9]
GREEDY = Sampling()


class WrongInBatches:
    """A model with wrong logits in forward passes over several tokens."""

    def __init__(self, model, noise):
        self.model, self.noise = model, noise
        self.layers = model.layers

    def __call__(self, tokens, cache=None):
        logits = self.model(tokens, cache=cache)
        if tokens.shape[1] == 1:
            return logits
        mx.random.seed(tokens.shape[1])
        return logits + self.noise * mx.random.normal(logits.shape)


def decode_speculatively(model):
    engine = Engine(
        model,
        make_proposer=lambda _: DraftModelProposer(DraftModelBatch(model)),
        draft_length=DraftLengthController(fixed=4),
    )
    return run(engine, [GenerationRequest(PROMPT, 100)])[0]


def test_check_parity_reports_mismatches_with_margins():
    model = tiny("llama")
    wrong_model = WrongInBatches(model, 0.5)
    completion = decode_speculatively(wrong_model)
    parity = check_parity(CacheState(model), PROMPT, completion, GREEDY)
    plain = decode_speculatively(model)
    first = next(i for i in range(100) if plain[i] != completion[i])
    mismatch = parity.mismatches[0]
    assert (mismatch.position, mismatch.token, mismatch.expected) == (
        first,
        completion[first],
        plain[first],
    )
    logits = model(mx.array([[*PROMPT, *completion[:first]]]))[0, -1]
    second, best = mx.sort(logits)[-2:].tolist()
    assert mismatch.margin == pytest.approx(best - second, abs=1e-4)
    report = parity.to_json()
    assert report["mismatches"] == len(parity.mismatches) > 1
    assert report["mismatches_per_1000"] == pytest.approx(10 * len(parity.mismatches))
    assert report["first_mismatch"]["position"] == first


def test_check_parity_separates_errors_from_rounding():
    model = tiny("llama")
    plain = decode_speculatively(model)
    assert check_parity(CacheState(model), PROMPT, plain, GREEDY).mismatches == []
    wrong = [*plain[:50], (plain[50] + 1) % 260, *plain[51:]]
    assert not check_parity(CacheState(model), PROMPT, wrong, GREEDY).to_json()[
        "all_from_rounding"
    ]
