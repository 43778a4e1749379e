"""Blocks trained after the closed form: what they gain, and what is undone."""

import re

import mlx.core as mx
import pytest
from test_gptq import SIZES, Report, model_of, quantized, tokens_of
from tiny_checkpoints import QWEN3_MOE

from toolkit.quant import gptq, rtn
from toolkit.quant.spec import QuantSpec

PLENTY = tokens_of(1, count=320)
LINE = re.compile(r"trained, it loses (\S+) of its output .*, (\S+) before")
TRAIN = {"steps": 40, "learning_rate": 0.03}


def run(folder, *, config=None, tokens=PLENTY, **settings):
    report = Report()
    model = model_of(**config) if config else model_of(**SIZES)
    tensors, model = quantized(
        gptq, model, folder, tokens=tokens, report=report, bits=2, **settings
    )
    errors = [
        tuple(map(float, found.groups()))
        for found in map(LINE.search, report.lines)
        if found
    ]
    return tensors, errors, report


def test_blocks_gain_on_tokens_held_out(tmp_path):
    _, errors, report = run(tmp_path, rounds=0, blocks=TRAIN)
    assert len(errors) == 2
    print(errors)
    assert all(after < before for after, before in errors)
    assert "training helped in 2 of 2 blocks" in report.lines
