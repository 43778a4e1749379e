"""Mixed-precision plans from given sensitivities, without a model."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
from lmx.config.quant_spec import QuantSpec
from lmx.config.quantize import MixedPrecisionConfig
from lmx.quantization.mixed_precision.search import SizeModel, candidate_plans
from lmx.quantization.target_layers import QuantizationPlan

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


def test_floating_point_modes_are_candidates():
    """The size counts 8 bits per group for the scale and none for a bias."""
    model = nn.Sequential(nn.Linear(96, 64, bias=False), nn.Linear(64, 32, bias=False))
    config = MixedPrecisionConfig(
        target_bpw=4.5, candidate_bits=[4], candidate_modes=["nvfp4", "mxfp4", "nvfp4"]
    )
    specs = {path: QuantSpec() for path in ("layers.0", "layers.1")}
    task = SimpleNamespace(model=model, dtype=mx.float16)
    sizes = SizeModel.of(task, QuantizationPlan(specs, {}), config)
    floats = [QuantSpec(mode=mode) for mode in ("mxfp4", "nvfp4")]
    affine = [QuantSpec(bits=4, group_size=group) for group in (32, 64, 128)]
    assert sizes.options["layers.0"] == [affine[0], *floats]
    assert sizes.options["layers.1"] == [*affine[:2], *floats]
    count = 96 * 64
    expected = [count * bits / 8 for bits in (5, 4.25, 4.5)]
    options = sizes.options["layers.0"]
    assert [sizes.layer_bytes("layers.0", spec) for spec in options] == expected
    costs = {"layers.0": [5.0, 1.0, 2.0], "layers.1": [4.0, 3.0, 1.0, 2.0]}
    plans = candidate_plans(sizes, [["layers.0"], ["layers.1"]], costs, 10**6)
    cheapest = plans["sensitivity"]
    assert cheapest == {"layers.0": floats[0], "layers.1": floats[0]}


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
