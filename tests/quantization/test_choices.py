"""Choices of grids from given costs, without any model."""

import mlx.core as mx
from lmx.config.quant_spec import QuantSpec
from lmx.quantization.mixed_precision.size_model import SizeModel, candidate_plans

SIZE, LIMIT = 1 << 16, 132_000
OPTIONS = [QuantSpec(bits=bits, group_size=64) for bits in (2, 4, 8)]


def found(costs, groups):
    free = dict.fromkeys(("a", "b", "c", "d"), SIZE)
    options = dict.fromkeys(free, OPTIONS)
    weighing = SizeModel(4 * SIZE, 8 * SIZE, 0, free, options, mx.float16)
    grids = candidate_plans(weighing, groups, costs, LIMIT)
    assert all(weighing.bytes(grid) <= LIMIT for grid in grids.values())
    return {way: [spec.bits for spec in grid.values()] for way, grid in grids.items()}


def test_the_dear_layer_gets_the_bits():
    costs = {path: [1.0, 0.1, 0.01] for path in "bcd"} | {"a": [50.0, 5.0, 0.1]}
    bits = found(costs, [[path] for path in "abcd"])
    assert bits["predictions"] == [8, 2, 2, 2]
    assert bits["all on 2 bits g64"] == [2, 2, 2, 2]


def test_layers_of_one_input_share_a_grid_or_not():
    costs = {path: [1.0, 0.1, 0.01] for path in "bcd"} | {"a": [9.0, 0.2, 0.1]}
    bits = found(costs, [["a", "b"], ["c", "d"]])
    assert bits["predictions"] == [4, 4, 2, 2]
    assert bits["every layer by itself"].count(4) == 3


def test_what_no_slope_reaches_is_not_taken_for_free():
    """As a router that only orders, or a layer without a token."""
    costs = {"a": [1.0, 0.2, 0.1], "b": [0.9, 0.2, 0.1], "c": [0.0, 0.0, 0.0]}
    bits = found(costs, [["a"], ["b"], ["c"]])
    assert bits["predictions"] == [4, 2, 4, 4]
