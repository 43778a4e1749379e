"""The controller on simulated machines: near the best length, hardly ever slower."""

import numpy as np
import pytest
from lmx.generation.speculative.draft_length import DraftLengthController

# Seconds of a verification of 1 ... 9 rows, in those of a plain step.
FLAT = [1 + 0.02 * rows for rows in range(9)]
STEEP = [1.0, 1.11, 1.2, 1.31, 1.45, 1.7, 1.98, 2.2, 2.45]
HOPELESS = [1.0, 1.83, 2.5, 3.26, 4.0, 4.7, 5.4, 6.12, 6.8]
BURST = 16


def simulate(controller, costs, draft, rate, tokens=2000, seed=0, noise=0.02):
    """Seconds that so many tokens take, in plain steps."""
    draw = np.random.default_rng(seed)
    total, said = 0.0, 0
    while said < tokens:
        length = controller.next_length()
        if not length:
            seconds = sum(1 + noise * draw.standard_normal() for _ in range(BURST))
            controller.record_standard(BURST, seconds)
            said += BURST
        else:
            seconds = costs[length] + draft * length
            seconds *= 1 + noise * draw.standard_normal()
            stood = 0
            while stood < length and draw.random() < rate:
                stood += 1
            controller.record_round(length, stood, seconds)
            said += stood + 1
        total += seconds
    return total / said


@pytest.mark.parametrize("costs", [FLAT, STEEP])
@pytest.mark.parametrize("rate", [0.5, 0.8, 0.95])
def test_controller_is_close_to_best_fixed_length(costs, rate):
    fixed = [
        simulate(DraftLengthController(fixed=k), costs, 0.05, rate, tokens=20000)
        for k in range(9)
    ]
    ours = simulate(DraftLengthController(), costs, 0.05, rate, tokens=20000)
    assert ours <= 1.03 * min(fixed)


@pytest.mark.parametrize(
    ("costs", "rate"), [(FLAT, 0.0), (STEEP, 0.05), (HOPELESS, 0.5)]
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
    assert DraftLengthController(fixed=5).next_length() == 5
