"""The accepted length at the end of a training is extrapolated from its first steps."""

import math

import pytest
from lmx.draft.forecast import Forecast


def test_it_is_on_a_line_through_the_logarithms():
    forecast = Forecast(1000)
    forecast.add(0, 1.0)
    assert forecast.at_the_end is None
    forecast.add(50, 1.2)
    assert forecast.at_the_end is None
    for step in (100, 150, 200):
        forecast.add(step, 1.2 + 0.1 * math.log2(step / 50))
    assert forecast.at_the_end == pytest.approx(1.2 + 0.1 * math.log2(20))


def test_it_is_at_least_one_token():
    forecast = Forecast(10**6)
    forecast.add(1, 1.3)
    forecast.add(2, 1.1)
    assert forecast.at_the_end == 1
