"""The ablation benchmark: steps, ratios, and the bytes of its roofline."""

import json
import sys
from pathlib import Path

import pytest
from lmx.cpu import quantized_matmul
from lmx.evaluation import memory_bandwidth
from tiny_checkpoints import LLAMA

WIDE = LLAMA | {"num_hidden_layers": 2, "max_position_embeddings": 128}


@pytest.fixture
def speed_ablation(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import speed_ablation

    return speed_ablation


def test_speed_ablation_compares_every_step(
    speed_ablation, make_checkpoint, capsys, monkeypatch
):
    monkeypatch.setattr(memory_bandwidth, "READ_BYTES", 1 << 16)
    # On a Linux CPU the 4-bit weights would be kept in float32.
    monkeypatch.setattr(quantized_matmul, "EXPANDED_SHARE", 0)
    folder = str(make_checkpoint(WIDE, dtype="float32"))
    options = ["--prompt-length=20", "--batch-size=4", "--max-tokens=8", "--json"]
    monkeypatch.setattr(sys, "argv", ["speed_ablation.py", folder, *options])
    speed_ablation.main()
    steps = {row["step"]: row for row in json.loads(capsys.readouterr().out)}
    best = "4-bit weights"
    assert {name: row["compared_with"] for name, row in steps.items()} == {
        "no cache": None,
        "cache": "no cache",
        best: "cache",
        "8-bit cache": best,
        "batch of 4, static": best,
        "batch of 4, continuous": "batch of 4, static",
        "speculative": best,
    }
    for name, row in steps.items():
        rate, before = row["tokens_per_second"], steps.get(row["compared_with"])
        assert row["cumulative"] == rate / steps["no cache"]["tokens_per_second"]
        if before:
            assert row["speedup"] == rate / before["tokens_per_second"], name
        roofline = row["roofline_tokens_per_second"]
        assert row["roofline_share"] == pytest.approx(rate / roofline)
    # Quantization reads fewer bytes per weight; a batch reads them once.
    rooflines = {name: row["roofline_tokens_per_second"] for name, row in steps.items()}
    assert rooflines[best] > 3 * rooflines["cache"]
    assert rooflines["batch of 4, static"] > rooflines[best]
