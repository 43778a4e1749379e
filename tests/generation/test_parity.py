"""Comparison with plain decoding: what it calls a flip, and who has none."""

import mlx.core as mx
import pytest
from lmx.generation.kv_cache import CacheState
from lmx.generation.sampling import Sampling
from lmx.generation.speculative.decoder import SpeculativeDecoder
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.draft_model import DraftModelProposer
from lmx.generation.speculative.parity import check_parity
from tiny_generators import tiny

PROMPT = [5, 9, 200, 31, 5, 9]
GREEDY = Sampling()


class Uneven:
    """A model whose logits are off where several tokens are read at once."""

    def __init__(self, model, off):
        self.model, self.off = model, off
        self.layers = model.layers

    def __call__(self, tokens, cache=None):
        logits = self.model(tokens, cache=cache)
        if tokens.shape[1] == 1:
            return logits
        mx.random.seed(tokens.shape[1])
        return logits + self.off * mx.random.normal(logits.shape)


def speculated(model, sampling=GREEDY, **options):
    speculator = SpeculativeDecoder(
        CacheState(model),
        DraftModelProposer(model),
        draft_length=DraftLengthController(max_draft_tokens=4, fixed=4),
        sampling=sampling,
        **options,
    )
    return list(speculator.decode(PROMPT, 200))


def test_check_parity_reports_mismatches_with_margins():
    model = tiny("llama")
    uneven = Uneven(model, 0.5)
    said = speculated(uneven)
    found = check_parity(CacheState(model), PROMPT, said, GREEDY)
    plain = speculated(model)
    first = next(i for i in range(200) if plain[i] != said[i])
    flip = found.mismatches[0]
    assert (flip.position, flip.token, flip.expected) == (
        first,
        said[first],
        plain[first],
    )
    logits = model(mx.array([[*PROMPT, *said[:first]]]))[0, -1]
    second, best = mx.sort(logits)[-2:].tolist()
    assert flip.margin == pytest.approx(best - second, abs=1e-4)
    report = found.to_json()
    assert report["mismatches"] == len(found.mismatches) > 1
    assert report["mismatches_per_1000"] == pytest.approx(5 * len(found.mismatches))
    assert report["first_mismatch"]["position"] == first


def test_check_parity_separates_errors_from_rounding():
    model = tiny("llama")
    plain = speculated(model)
    assert check_parity(CacheState(model), PROMPT, plain, GREEDY).mismatches == []
    wrong = [*plain[:50], (plain[50] + 1) % 260, *plain[51:]]
    assert not check_parity(CacheState(model), PROMPT, wrong, GREEDY).to_json()[
        "all_from_rounding"
    ]


def test_sequential_verify_has_no_mismatches():
    """The passes of several tokens alone are off, so whoever has none is exact."""
    for sampling in (GREEDY, Sampling(repetition_penalty=1.2)):
        model = tiny("llama")
        said = speculated(
            Uneven(model, 0.5), sampling, sequential_verify=True, prefill_step_size=1
        )
        assert check_parity(CacheState(model), PROMPT, said, sampling).mismatches == []
