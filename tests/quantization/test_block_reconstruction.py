"""Block reconstruction: what it gains, and that a worse result is rejected."""

import re

import mlx.core as mx
import pytest
from lmx.errors import UserError
from lmx.quantization.ptq import block_reconstruction
from mlx.utils import tree_flatten
from test_gptq import RecordingLogger, model_of, quantized, tokens_of
from tiny_checkpoints import QWEN3_MOE

PLENTY = tokens_of(1, count=128)
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
LINE = re.compile(r"error on held-out tokens (\S+) -> (\S+?)(?:: rejected)?$")
TRAIN = {"steps": 8, "learning_rate": 0.003}


def run(folder, *, model=None, tokens=PLENTY, logger=None, **settings):
    """Tensors, the quantized model, held-out errors before and after, and log lines."""
    logger = logger or RecordingLogger()
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
        # Plain GPTQ leaves an error to reduce.
        output_hessian=False,
        asymmetric_calibration=False,
        **settings,
    )
    matches = filter(None, map(LINE.search, logger.lines))
    errors = [tuple(map(float, match.groups())) for match in matches]
    return tensors, model, errors, logger.lines


def same(left, right):
    assert left.keys() == right.keys()
    return all(mx.array_equal(value, right[name]) for name, value in left.items())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run(tmp_path_factory.mktemp("trained"), block_reconstruction=TRAIN)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"))


def test_reconstruction_reduces_the_held_out_error(trained, plain):
    tensors, _, errors, lines = trained
    assert len(errors) == 2
    assert all(after < before for before, after in errors)
    assert "block reconstruction improved 2 of 2 blocks" in lines
    assert not any("held-out" in line for line in plain[3])
    assert not same(tensors, plain[0])


def test_worse_reconstruction_is_rejected(tmp_path, plain):
    wild = TRAIN | {"learning_rate": 3.0}
    tensors, _, errors, lines = run(tmp_path, block_reconstruction=wild)
    assert all(after == before for before, after in errors)
    assert sum("rejected" in line for line in lines) == 2
    assert "block reconstruction improved 0 of 2 blocks" in lines
    assert same(tensors, plain[0])


def test_reconstruction_resumes_after_a_kill(tmp_path, trained):
    logger = RecordingLogger()

    def die(line):
        if "layers.1: block reconstruction" in line:
            raise KeyboardInterrupt
        logger.lines.append(line)

    logger.info = die
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, block_reconstruction=TRAIN, logger=logger)
    tensors, _, errors, _ = run(tmp_path, block_reconstruction=TRAIN)
    assert len(errors) == 1
    assert same(tensors, trained[0])


def test_reconstruction_of_experts_and_other_grids(tmp_path):
    overrides = {"self_attn.o_proj": {"bits": 4}, "self_attn.q_proj": "skip"}
    model = model_of(QWEN3_MOE, num_hidden_layers=1)
    before = dict(tree_flatten(model.parameters()))
    tensors, model, errors, _ = run(
        tmp_path, model=model, block_reconstruction=TRAIN, overrides=overrides
    )
    [(start, end)] = errors
    assert end < start
    after = dict(tree_flatten(model.parameters()))
    changed = {name for name in after if not mx.array_equal(before[name], after[name])}
    assert changed == {f"{name.rpartition('.')[0]}.weight" for name in tensors}


def test_reconstruction_needs_two_shards_of_tokens(tmp_path):
    few = tokens_of(1, count=8)
    *_, lines = run(tmp_path, tokens=few, block_reconstruction=TRAIN)
    assert any("block reconstruction skipped" in line for line in lines)


def test_architecture_without_gradient_is_an_error(tmp_path, monkeypatch):
    def broken(*_):
        raise ValueError("[Primitive::vjp] Not implemented")

    monkeypatch.setattr(block_reconstruction._BlockTrainer, "_output", broken)
    with pytest.raises(UserError, match=r"layers\.0 cannot be trained"):
        run(tmp_path, block_reconstruction=TRAIN)
