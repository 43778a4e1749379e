"""Block reconstruction reduces the error and rejects a worse result."""

import re

import mlx.core as mx
import pytest
from lmx.errors import UserError
from lmx.quantization.ptq import block_reconstruction
from mlx.utils import tree_flatten
from test_gptq import RecordingLogger, model_of, quantized, tokens_of
from tiny_checkpoints import QWEN3_MOE

MANY_TOKENS = tokens_of(1, count=128)
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
LINE = re.compile(r"error on held-out tokens (\S+) -> (\S+?)(?:: rejected)?$")
TRAIN = {"steps": 8, "learning_rate": 0.003}


def run(folder, *, model=None, tokens=MANY_TOKENS, logger=None, **settings):
    """Return tensors, the quantized model, held-out errors and log lines.

    The errors are pairs: before and after the reconstruction.
    """
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
        # Basic GPTQ leaves an error to reduce.
        output_hessian=False,
        asymmetric_calibration=False,
        **settings,
    )
    matches = filter(None, map(LINE.search, logger.lines))
    errors = [tuple(map(float, match.groups())) for match in matches]
    return tensors, model, errors, logger.lines


def equal(actual, expected):
    assert actual.keys() == expected.keys()
    return all(mx.array_equal(value, expected[name]) for name, value in actual.items())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run(tmp_path_factory.mktemp("trained"), block_reconstruction=TRAIN)


@pytest.fixture(scope="module")
def without_reconstruction(tmp_path_factory):
    return run(tmp_path_factory.mktemp("without"))


def test_reconstruction_reduces_the_held_out_error(trained, without_reconstruction):
    tensors, _, errors, lines = trained
    assert len(errors) == 2
    assert all(after < before for before, after in errors)
    assert "block reconstruction improved 2 of 2 blocks" in lines
    assert not any("held-out" in line for line in without_reconstruction[3])
    assert not equal(tensors, without_reconstruction[0])


def test_worse_reconstruction_is_rejected(tmp_path, without_reconstruction):
    high_rate = TRAIN | {"learning_rate": 3.0}
    tensors, _, errors, lines = run(tmp_path, block_reconstruction=high_rate)
    assert all(after == before for before, after in errors)
    assert sum("rejected" in line for line in lines) == 2
    assert "block reconstruction improved 0 of 2 blocks" in lines
    assert equal(tensors, without_reconstruction[0])


def test_reconstruction_resumes_after_a_kill(tmp_path, trained):
    logger = RecordingLogger()

    def interrupt(line):
        if "layers.1: block reconstruction" in line:
            raise KeyboardInterrupt
        logger.lines.append(line)

    logger.info = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, block_reconstruction=TRAIN, logger=logger)
    tensors, _, errors, _ = run(tmp_path, block_reconstruction=TRAIN)
    assert len(errors) == 1
    assert equal(tensors, trained[0])


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
    few_tokens = tokens_of(1, count=8)
    *_, lines = run(tmp_path, tokens=few_tokens, block_reconstruction=TRAIN)
    assert any("block reconstruction skipped" in line for line in lines)


def test_architecture_without_gradient_is_an_error(tmp_path, monkeypatch):
    def broken(*_):
        raise ValueError("[Primitive::vjp] Not implemented")

    monkeypatch.setattr(block_reconstruction._BlockTrainer, "_output", broken)
    with pytest.raises(UserError, match=r"layers\.0 cannot be trained"):
        run(tmp_path, block_reconstruction=TRAIN)
