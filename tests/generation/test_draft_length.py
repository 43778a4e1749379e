"""The draft-length controller on simulated machines."""

import numpy as np
import pytest
from lmx.generation.speculative.draft_length import (
    DraftLengthController,
    SpeculativeStats,
)

# Seconds to verify 1 to 9 tokens, relative to a standard step.
FLAT = [1 + 0.02 * num_tokens for num_tokens in range(9)]
STEEP = [1.0, 1.11, 1.2, 1.31, 1.45, 1.7, 1.98, 2.2, 2.45]
VERY_STEEP = [1.0, 1.83, 2.5, 3.26, 4.0, 4.7, 5.4, 6.12, 6.8]
STANDARD_TOKENS = 16


def simulate(controller, costs, draft, rate, tokens=2000, seed=0, noise=0.02):
    """Seconds per token, relative to standard decoding."""
    rng = np.random.default_rng(seed)
    total, generated = 0.0, 0
    while generated < tokens:
        length = controller.next_length()
        if not length:
            seconds = sum(
                1 + noise * rng.standard_normal() for _ in range(STANDARD_TOKENS)
            )
            controller.record_standard(STANDARD_TOKENS, seconds)
            generated += STANDARD_TOKENS
        else:
            seconds = costs[length] + draft * length
            seconds *= 1 + noise * rng.standard_normal()
            accepted = 0
            while accepted < length and rng.random() < rate:
                accepted += 1
            controller.record_round([length], [accepted], seconds)
            generated += accepted + 1
        total += seconds
    return total / generated


@pytest.mark.parametrize("costs", [FLAT, STEEP])
@pytest.mark.parametrize("rate", [0.5, 0.8, 0.95])
def test_controller_is_close_to_best_fixed_length(costs, rate):
    # A round of k draft tokens generates 1 + rate + ... + rate^k.
    fixed = [
        (costs[k] + 0.05 * k) / sum(rate**n for n in range(k + 1)) for k in range(9)
    ]
    adaptive = simulate(DraftLengthController(), costs, 0.05, rate, tokens=20000)
    assert adaptive <= 1.03 * min(fixed)


@pytest.mark.parametrize(
    ("costs", "rate"), [(FLAT, 0.0), (STEEP, 0.05), (VERY_STEEP, 0.5)]
)
def test_controller_overhead_is_small_when_drafting_is_useless(costs, rate):
    for seed in range(5):
        assert simulate(DraftLengthController(), costs, 0.1, rate, seed=seed) < 1.03


def test_controller_resumes_drafting_when_acceptance_rises():
    controller = DraftLengthController()
    simulate(controller, STEEP, 0.05, 0.0)
    assert controller.next_length() == 0 or controller.lost < 0.03 * controller.seconds
    assert simulate(controller, STEEP, 0.05, 0.9, tokens=6000) < 0.8


def test_expected_tokens_match_closed_form():
    controller = DraftLengthController(max_draft_tokens=4)
    controller.accepted, controller.proposed = (
        [8.0, 4.0, 2.0, 1.0],
        [10.0, 8.0, 4.0, 2.0],
    )
    assert controller.expected_tokens(0) == 1
    assert controller.expected_tokens(3) == pytest.approx(
        1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.25
    )


def test_controller_keeps_fixed_length():
    controller = DraftLengthController(fixed=5)
    assert simulate(controller, VERY_STEEP, 0.1, 0.0) > 4
    assert controller.next_length() == 5


@pytest.mark.parametrize(("costs", "rate"), [(STEEP, 0.05), (VERY_STEEP, 0.5)])
def test_a_fixed_length_in_a_batch_rests_where_it_does_not_pay(costs, rate):
    controller = DraftLengthController(fixed=8).like()
    assert controller.next_length() == 8
    assert simulate(controller, costs, 0.1, rate, tokens=20_000) < 1.06
    # It goes on where it pays.
    controller = DraftLengthController(fixed=4).like()
    assert simulate(controller, FLAT, 0.05, 0.9, tokens=5000) < 0.5
    assert controller.next_length() == 4


def test_counts_of_a_round_end_with_the_first_rejected_token():
    stats = SpeculativeStats()
    for drafted, accepted in (3, 1), (2, 2), (3, 0):
        stats.add_round(drafted, accepted)
    assert (stats.proposed, stats.accepted) == ([3, 2, 0], [2, 1, 0])
    assert stats.acceptance_rate_by_position == [2 / 3, 0.5, 0.0]
    assert (stats.acceptance_rate, stats.accepted_length) == (3 / 5, 2.0)
