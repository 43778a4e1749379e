"""Blocks trained after the closed form: what they gain, and what is undone."""

import re

import mlx.core as mx
import pytest
from lmx.errors import UserError
from lmx.quantization.ptq import block_reconstruction
from mlx.utils import tree_flatten
from test_gptq import Report, model_of, quantized, tokens_of
from tiny_checkpoints import QWEN3_MOE

PLENTY = tokens_of(1, count=128)
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
LINE = re.compile(r"trained, it loses (\S+) of its output .* held out, (\S+) before")
TRAIN = {"steps": 8, "learning_rate": 0.003}


def run(folder, *, model=None, tokens=PLENTY, logger=None, **settings):
    """Tensors, the model they make, held-out errors of blocks, and what was told."""
    logger = logger or Report()
    model = model or model_of(**SIZES)
    tensors, model = quantized(
        "gptq",
        model,
        folder,
        tokens=tokens,
        logger=logger,
        bits=2,
        group_size=32,
        refine_iters=0,
        # What is left to gain: plain GPTQ makes up for nothing but its own columns.
        output_hessian=False,
        asymmetric_calibration=False,
        **settings,
    )
    found = filter(None, map(LINE.search, logger.lines))
    return tensors, model, [tuple(map(float, f.groups())) for f in found], logger.lines


def same(left, right):
    assert left.keys() == right.keys()
    return all(mx.array_equal(value, right[name]) for name, value in left.items())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run(tmp_path_factory.mktemp("trained"), block_reconstruction=TRAIN)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"))


def test_blocks_gain_on_tokens_held_out(trained, plain):
    tensors, _, errors, lines = trained
    assert len(errors) == 2
    assert all(after < before for after, before in errors)
    assert "training helped in 2 of 2 blocks" in lines
    assert not any("held out" in line for line in plain[3])
    assert not same(tensors, plain[0])


def test_what_is_no_better_is_undone(tmp_path, plain):
    wild = TRAIN | {"learning_rate": 3.0}
    tensors, _, errors, lines = run(tmp_path, block_reconstruction=wild)
    assert all(after == before for after, before in errors)
    assert sum("undone" in line for line in lines) == 2
    assert "training helped in 0 of 2 blocks" in lines
    assert same(tensors, plain[0])


def test_killed_and_resumed(tmp_path, trained):
    logger = Report()

    def die(line):
        if "layers.1: trained" in line:
            raise KeyboardInterrupt
        logger.lines.append(line)

    logger.info = die
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, block_reconstruction=TRAIN, logger=logger)
    tensors, _, errors, _ = run(tmp_path, block_reconstruction=TRAIN)
    assert len(errors) == 1
    assert same(tensors, trained[0])


def test_experts_and_layers_on_another_grid(tmp_path):
    layers = {"self_attn.o_proj": {"bits": 4}, "self_attn.q_proj": "skip"}
    model = model_of(QWEN3_MOE, num_hidden_layers=1)
    before = dict(tree_flatten(model.parameters()))
    tensors, model, errors, _ = run(
        tmp_path, model=model, block_reconstruction=TRAIN, overrides=layers
    )
    [(after, start)] = errors
    assert after < start
    after = dict(tree_flatten(model.parameters()))
    changed = {name for name in after if not mx.array_equal(before[name], after[name])}
    assert changed == {f"{name.rpartition('.')[0]}.weight" for name in tensors}


def test_one_part_of_tokens_is_not_enough(tmp_path):
    few = tokens_of(1, count=8)
    *_, lines = run(tmp_path, tokens=few, block_reconstruction=TRAIN)
    assert any("no block was trained" in line for line in lines)


def test_code_without_a_gradient_is_named(tmp_path, monkeypatch):
    def broken(*_):
        raise ValueError("[Primitive::vjp] Not implemented")

    monkeypatch.setattr(block_reconstruction._BlockTrainer, "_outputs", broken)
    with pytest.raises(UserError, match=r"layers\.0 cannot be trained"):
        run(tmp_path, block_reconstruction=TRAIN)
