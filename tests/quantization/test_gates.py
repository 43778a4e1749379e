"""Gates: the better candidate is kept, whichever comes first, and it is said."""

import mlx.core as mx
import pytest
from lmx.models.loader import load
from lmx.quantization.ptq.candidates import CandidateModel, CandidateSelector
from lmx.training.teacher_cache import cache_part_targets
from test_contract import quantize

TOKENS = [mx.random.randint(0, 320, (2, 16), key=mx.random.key(1))]


@pytest.fixture(scope="module")
def case(make_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gates")
    source = make_checkpoint()
    _, tensors, _ = quantize("rtn", source, folder / "q")
    held_out = cache_part_targets(
        folder / "h",
        TOKENS,
        load(source).model,
        digest="a",
        top_k=64,
        info=lambda _: None,
    )
    return folder / "q", tensors, held_out


def worse(tensors, factor=1.5):
    return {k: factor * v if k.endswith("scales") else v for k, v in tensors.items()}


def gates_of(case):
    path, tensors, held_out = case
    lines = []
    student = CandidateModel(load(path).model, mx.float16)
    return CandidateSelector(student, held_out, lines.append), tensors, lines


def test_a_step_that_helps_is_kept(case):
    gates, tensors, lines = gates_of(case)
    assert gates.judge("rounding", worse(tensors))
    assert gates.judge("method", tensors)
    assert gates.kept == "method"
    assert gates.tensors is tensors
    assert list(gates.divergences) == ["rounding", "method"]
    assert lines[1].startswith("method: held-out KL ")
    assert "(rounding " in lines[1]
    assert "undone" not in lines[1]


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_a_step_that_harms_is_undone(case, factor):
    gates, tensors, lines = gates_of(case)
    gates.judge("rounding", tensors)
    before = gates._student.model(TOKENS[0])
    assert not gates.judge("method", worse(tensors, factor))
    assert gates.kept == "rounding"
    assert gates.tensors is tensors
    assert "undone, rounding is kept" in lines[1]
    assert mx.array_equal(gates._student.model(TOKENS[0]), before)


def test_no_better_is_undone_too(case):
    gates, tensors, _ = gates_of(case)
    gates.judge("rounding", tensors)
    assert not gates.judge("method", dict(tensors))


def test_anything_is_better_than_what_is_no_number(case):
    gates, tensors, _ = gates_of(case)
    gates.judge("rounding", worse(tensors, float("nan")))
    assert gates.judge("method", tensors)
