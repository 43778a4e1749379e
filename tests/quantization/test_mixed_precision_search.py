"""Mixed-precision plans from given sensitivities, without a model."""

import mlx.core as mx
from lmx.config.quant_spec import QuantSpec
from lmx.quantization.mixed_precision.search import SizeModel, candidate_plans

SIZE, LIMIT = 1 << 16, 132_000
OPTIONS = [QuantSpec(bits=bits, group_size=64) for bits in (2, 4, 8)]


def bits_by_plan(costs, groups):
    free = dict.fromkeys(("a", "b", "c", "d"), SIZE)
    options = dict.fromkeys(free, OPTIONS)
    sizes = SizeModel(4 * SIZE, 8 * SIZE, 0, free, options, mx.float16)
    plans = candidate_plans(sizes, groups, costs, LIMIT)
    assert all(sizes.total_bytes(specs) <= LIMIT for specs in plans.values())
    return {
        name: [spec.bits for spec in specs.values()] for name, specs in plans.items()
    }


def test_candidate_plans_give_bits_to_the_sensitive_layer():
    costs = {path: [1.0, 0.1, 0.01] for path in "bcd"} | {"a": [50.0, 5.0, 0.1]}
    bits = bits_by_plan(costs, [[path] for path in "abcd"])
    assert bits["sensitivity"] == [8, 2, 2, 2]
    assert bits["uniform 2 bits g64"] == [2, 2, 2, 2]


def test_candidate_plans_tie_and_untie_layers_of_one_input():
    costs = {path: [1.0, 0.1, 0.01] for path in "bcd"} | {"a": [9.0, 0.2, 0.1]}
    bits = bits_by_plan(costs, [["a", "b"], ["c", "d"]])
    assert bits["sensitivity"] == [4, 4, 2, 2]
    assert bits["sensitivity, layers untied"].count(4) == 3


def test_candidate_plans_charge_layers_without_a_gradient():
    """Routers and layers that receive no token have no gradient."""
    costs = {"a": [1.0, 0.2, 0.1], "b": [0.9, 0.2, 0.1], "c": [0.0, 0.0, 0.0]}
    bits = bits_by_plan(costs, [["a"], ["b"], ["c"]])
    assert bits["sensitivity"] == [4, 2, 4, 4]
