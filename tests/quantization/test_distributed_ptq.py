"""Several processes quantize like one: they divide calibration windows and solves.

A matrix product of other rows may round otherwise and move a tie. The error of such a
code shifts the targets of later ones. So the cases have tokens on which codes moved
before ranks had rows in sixteens. Statistics are compared behind RTN, which does not
depend on them.
"""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import test_sequential
from lmx.config.quant_spec import QuantSpec
from lmx.config.quantize import GPTQConfig
from lmx.interfaces import SINGLE_PROCESS, Communicator
from lmx.quantization.ptq import sequential
from lmx.quantization.ptq.gptq.solver import LayerProblem, solve_layers
from lmx.quantization.ptq.hessian import damped
from lmx.quantization.ptq.methods import METHODS
from lmx.quantization.target_layers import select_layers
from lmx.run.distributed import ProcessGroup
from processes import cases_of, in_ring
from quantization_samples import (
    context_of,
    correlated_inputs,
    enlarged_model,
    normal,
    windows_of,
)
from test_gptq import tokens_of
from test_sequential import TOKENS, RecordingRTN
from test_sequential import model_of as sequential_model
from tiny_checkpoints import LLAMA, QWEN3_MOE

PROGRAM = """
import sys
from pathlib import Path
import test_distributed_ptq as module
from lmx import cpu
from lmx.run.distributed import join
cpu.enable()
module.save_cases(join(), Path(sys.argv[1]), sys.argv[2:])
"""
SIZES = {"hidden_size": 128, "intermediate_size": 192}
# Sets of few rows, which are no multiple of sixteen.
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
# Tokens after the last of a window that counts are not seen.
COUNTED = np.arange(TOKENS.shape[1]) < np.array([[24], [9], [17], [24], [5], [12]])
COUNTED[0, :7] = False
STATISTICS = {
    "dense": {},
    "tied": {"tie_word_embeddings": True},
    "weighted": {"counted": COUNTED},
    "experts": {"config": QWEN3_MOE},
}
# Model settings, keys of a recipe, and the seed of the tokens.
CODES = {
    "gptq": (LLAMA | SIZES | {"tie_word_embeddings": True}, {}, 7),
    "narrow": (LLAMA | NARROW, {"group_size": 32}, 3),
    "fast": (LLAMA | SIZES, {"effort": "fast"}, 1),
    "tiny": (LLAMA | {"intermediate_size": 64}, {"effort": "fast"}, 1),
    "experts": (QWEN3_MOE | {"num_hidden_layers": 1}, {}, 1),
    "nvfp4": (LLAMA, {"mode": "nvfp4"}, 1),
}
# Grids, and whether rows compensate for each other's errors.
SOLVES = {
    "affine": (QuantSpec(bits=4, group_size=32), False),
    "coupled": (QuantSpec(bits=4, group_size=32), True),
    "nvfp4": (QuantSpec(mode="nvfp4", bits=4, group_size=16), True),
    "q4_k": (QuantSpec(mode="q4_k", bits=4, group_size=32), True),
}


def statistics_of(ranks: Communicator, folder: Path, case: str) -> dict:
    """What a method receives for every layer."""
    settings = dict(STATISTICS[case])
    counted = settings.pop("counted", None)
    method = RecordingRTN(weighs_outputs=True)
    # 6 windows in shards of one, so that ranks have several.
    tensors = method.run(
        sequential_model(**settings | {"num_hidden_layers": 2}),
        folder,
        counted=counted,
        shard_size=1,
        ranks=ranks,
    )
    values = {f"tensor {name}": np.array(value) for name, value in tensors.items()}
    for path, statistics in method.statistics.items():
        for name, value in vars(statistics).items() if statistics else ():
            if name == "ranks":
                continue
            by_path = value if isinstance(value, dict) else {"": value}
            values |= {
                f"{path} {name} {key}": np.array(part, np.float64)
                for key, part in by_path.items()
                if part is not None
            }
    return values


def tensors_of(ranks: Communicator, folder: Path, case: str) -> dict:
    """The tensors of GPTQ."""
    settings, keys, seed = CODES[case]
    model, config = enlarged_model(settings), GPTQConfig(**keys)
    sequential.BATCH_TOKENS = 512
    tokens, specs = windows_of(tokens_of(seed)), select_layers(model, config).specs
    context = context_of(model, specs, tokens, folder, ranks=ranks)
    tensors = METHODS["gptq"](config, context).quantize()
    return {name: np.array(value) for name, value in tensors.items()}


def solutions_of(ranks: Communicator, folder: Path, case: str) -> dict:
    """Layers of different sizes with one Hessian."""
    spec, is_coupled = SOLVES[case]
    x = mx.array(correlated_inputs(256), mx.float32)
    hessian, layers = damped(x.T @ x, spec.group_size, 0.01), {}
    for number, rows in enumerate((97, 32, 1)):
        gradients = normal(4 * rows, rows, seed=10 + number, scale=1.0)
        fisher = gradients.T @ gradients if is_coupled and rows > 1 else None
        weight = normal(rows, 256, seed=number)
        layers[f"{number}"] = LayerProblem(weight, output_fisher=fisher)
    solved = solve_layers(layers, hessian, spec, mx.float32, ranks=ranks)
    return {
        f"{path}.{name}": np.array(value)
        for path, layer in solved.items()
        for name, value in layer.tensors.items()
    }


def leave_out(ranks: Communicator) -> None:
    """The sums of rank 1 do not arrive."""
    real = ranks.all_sum
    ranks.all_sum = lambda values: real([v * ranks.is_first for v in values])


def swap_shards(ranks: Communicator) -> None:
    """Rank 1 has the windows of rank 0 in its shards. This is the last case."""
    if not ranks.is_first:
        test_sequential.TOKENS = TOKENS[::-1]


FAULTS = {"leave out": leave_out, "swap shards": swap_shards}


def save_cases(ranks: Communicator, folder: Path, names: list[str]) -> None:
    """Run cases and save their results by rank; a name is "kind/case/fault"."""
    results = {}
    for name in names:
        kind, case, fault = name.split("/")
        place = folder / name.replace("/", "-")
        place.mkdir(exist_ok=True)
        group = ProcessGroup(ranks.group)
        if fault:
            FAULTS[fault](group)
        results[name] = globals()[kind](group, place, case)
    arrays = {f"{n}|{key}": v for n, by in results.items() for key, v in by.items()}
    np.savez(folder / f"{ranks.rank}.npz", **arrays)


def in_processes(names: list[str], folder: Path, count: int = 2) -> list[dict]:
    """The results by rank and name."""
    processes = in_ring(PROGRAM, str(folder), *names, folder=folder, count=count)
    assert [p.returncode for p in processes] == [0] * count, processes
    return [cases_of(folder / f"{rank}.npz") for rank in range(count)]


def largest_error(values: dict, expected: dict) -> float:
    """Relative to the largest value of each array; of a strength, in hundredths."""
    assert values.keys() == expected.keys()
    errors = [0.0]
    for name, array in expected.items():
        difference = np.abs(values[name].astype(np.float64) - array).max(initial=0)
        scale = np.abs(array).max(initial=1e-30)
        errors.append(difference / (100 if "strength" in name else scale))
    return max(errors)


def assert_statistics_are_equal(cases, folder, count):
    names = [f"statistics_of/{case}/" for case in cases]
    by_rank = in_processes(names, folder, count)
    for case, name in zip(cases, names, strict=True):
        place = folder / f"one-{case}"
        place.mkdir()
        expected = statistics_of(SINGLE_PROCESS, place, case)
        assert any("fisher" in key for key in expected)
        for results in by_rank:
            assert largest_error(results[name], expected) < 1e-5, case


@pytest.mark.slow
def test_statistics_are_those_of_one_process(tmp_path):
    assert_statistics_are_equal(list(STATISTICS), tmp_path, 3)


@pytest.mark.slow
def test_wrong_sums_and_shards_are_found(tmp_path):
    names = [f"statistics_of/dense/{fault}" for fault in ("", *FAULTS)]
    results = in_processes(names, tmp_path)[0]
    expected = results.pop(names[0])
    for name, values in results.items():
        assert largest_error(values, expected) > 1e-2, name


def moved_codes(values: dict, expected: dict) -> tuple[int, int]:
    """Number of other codes of 4 bits, and of all; the scales must be close."""
    assert values.keys() == expected.keys()
    moved = total = 0
    for name, array in expected.items():
        if name.endswith("weight"):
            different = values[name] ^ array
            moved += sum(
                int(np.count_nonzero(different >> shift & 15))
                for shift in range(0, 32, 4)
            )
            total += 8 * array.size
        else:
            error = np.abs(values[name].astype(np.float64) - array).max()
            assert error <= 1e-5 * np.abs(array.astype(np.float64)).max(), name
    return moved, total


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_rows_are_divided(tmp_path, count):
    names = [f"solutions_of/{case}/" for case in SOLVES]
    first, *others = in_processes(names, tmp_path, count)
    for case, name in zip(SOLVES, names, strict=True):
        expected = solutions_of(SINGLE_PROCESS, tmp_path, case)
        if expected["0.weight"].dtype == np.uint32:
            moved, total = moved_codes(first[name], expected)
            assert not moved, (case, moved, total)
        else:
            assert largest_error(first[name], expected) < 1e-5
        for other in others:
            for key, value in first[name].items():
                np.testing.assert_array_equal(other[name][key], value)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_codes_are_those_of_one_process(tmp_path, count):
    names = [f"tensors_of/{case}/" for case in CODES]
    first, *others = in_processes(names, tmp_path, count)
    for case, name in zip(CODES, names, strict=True):
        place = tmp_path / f"one-{case}"
        place.mkdir()
        moved, total = moved_codes(first[name], tensors_of(SINGLE_PROCESS, place, case))
        assert not moved, (case, moved, total)
        for other in others:
            for key, value in first[name].items():
                np.testing.assert_array_equal(other[name][key], value)


def test_one_layer_has_the_codes_of_one_process(tmp_path):
    names = ["tensors_of/tiny/", "tensors_of/tiny/leave out"]
    results = in_processes(names, tmp_path)[0]
    expected = tensors_of(SINGLE_PROCESS, tmp_path, "tiny")
    moved, total = moved_codes(results[names[0]], expected)
    assert not moved, total
    # One process reads the state of two.
    state = tmp_path / "tensors_of-tiny-"
    times = {file: file.stat().st_mtime_ns for file in state.rglob("tensors.*")}
    tensors_of(SINGLE_PROCESS, state, "tiny")
    assert times == {file: file.stat().st_mtime_ns for file in times}
    with pytest.raises(AssertionError):
        moved_codes(results[names[1]], expected)
