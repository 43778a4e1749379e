"""Per-layer quantization by pattern or by size budget, from the command line."""

import json

import mlx.core as mx
import mlx_lm
import pytest
from lmx.models.checkpoint import checkpoint_size
from lmx.models.loader import load
from tiny_runs import TRAIN, Run

MIXED = {
    "*.down_proj": {"bits": 5},
    "self_attn.[qk]_proj": {"mode": "mxfp4"},
    "model.layers.1.*": {"bits": 3, "group_size": 32},
    "mlp.gate_proj": "skip",
}
CALIBRATION = {"num_tokens": 1024, "max_seq_length": 32}


def make_run(folder, model, **settings):
    stage = {"quantize": {"calibration": CALIBRATION} | settings}
    return Run(folder, stage, model=model)


def matches_mlx_lm_logits(folder) -> bool:
    """Bitwise for one token; within a tolerance for many tokens in float32."""
    tokens = mx.arange(24)[None]
    mlx_lm_model, _ = mlx_lm.load(str(folder))
    model = load(folder, compute="stored").model
    is_exact = mx.array_equal(model(tokens[:, :1]), mlx_lm_model(tokens[:, :1]))
    mlx_lm_model.set_dtype(mx.float32)
    model = load(folder, compute="float32").model
    is_close = mx.allclose(model(tokens), mlx_lm_model(tokens), rtol=1e-4, atol=1e-4)
    return bool(is_exact.item() and is_close.item())


@pytest.mark.parametrize("kind", ["gptq", "train"])
def test_mixed_precision_checkpoint_loads_in_mlx_lm(kind, tmp_path, base):
    settings = {"bits": 4, "group_size": 64, "overrides": MIXED}
    if kind == "train":
        stage = {"train": TRAIN | {"qat": settings}}
    else:
        method = {"method": kind, "calibration": CALIBRATION}
        stage = {"quantize": settings | method}
    run = Run(tmp_path, stage, model=base)
    assert run() == 0
    folder = next((run.output / "stages").glob("1-*")) / "model"
    written = json.loads((folder / "config.json").read_text())["quantization"]
    assert written["model.layers.0.mlp.gate_proj"] is False
    assert written["model.layers.0.mlp.down_proj"]["bits"] == 5
    assert written["model.layers.1.self_attn.q_proj"]["mode"] == "mxfp4"
    out_proj = written.get("model.layers.1.self_attn.o_proj", written)
    assert (out_proj["bits"], out_proj["group_size"]) == (3, 32)
    assert matches_mlx_lm_logits(folder)


def test_mixed_precision_target_is_met_to_the_byte(tmp_path, base):
    budget = {
        "target_bpw": 5.25,
        "candidate_bits": [3, 8],
        "candidate_group_sizes": [64],
    }
    run = make_run(tmp_path, base, mixed_precision=budget, method="rtn")
    assert run() == 0
    folder = run.output / "stages/1-quantize/model"
    stage = run.json("manifest.json")["stages"]["1-quantize"]
    facts = stage["result"]["facts"]["mixed_precision"]
    sizes = checkpoint_size(folder)
    assert facts["candidates"][facts["selected"]] == min(facts["candidates"].values())
    assert facts["bytes"] == sizes.bytes
    assert facts["bits_per_weight"] == pytest.approx(sizes.bits_per_weight)
    limit = budget["target_bpw"] * sizes.parameters / 8
    # The remaining budget is too small for the next wider candidate of any layer.
    assert 0.97 * limit < sizes.bytes <= limit
    assert matches_mlx_lm_logits(folder)


def test_unknown_override_key_gets_a_hint(tmp_path, base, capsys):
    run = make_run(tmp_path, base, overrides={"*.down_proj": {"bitz": 4}, "*": "leave"})
    assert run() == 2
    error = capsys.readouterr().err
    assert "unknown key 'bitz'" in error
    assert "did you mean 'bits'?" in error
    assert "2 problems" in error


def test_overrides_count_towards_mixed_precision_target(tmp_path, base):
    layers = {"*.down_proj": {"mode": "mxfp4"}, "mlp.up_proj": "skip"}
    budget = {"target_bpw": 5.5, "candidate_bits": [2, 3, 6]}
    run = make_run(
        tmp_path, base, mixed_precision=budget, overrides=layers, method="rtn"
    )
    assert run() == 0
    folder = run.output / "stages/1-quantize/model"
    written = json.loads((folder / "config.json").read_text())["quantization"]
    for block in range(2):
        assert written[f"model.layers.{block}.mlp.down_proj"]["mode"] == "mxfp4"
        assert written[f"model.layers.{block}.mlp.up_proj"] is False
    stage = run.json("manifest.json")["stages"]["1-quantize"]
    sizes = checkpoint_size(folder)
    assert stage["result"]["facts"]["mixed_precision"]["bytes"] == sizes.bytes
    assert sizes.bits_per_weight <= 5.5


@pytest.mark.parametrize(
    ("bits", "message", "hint"),
    [
        (1.0, "no choice of grids fits", "bits per weight"),
        (17.0, "holds the unquantized model", "smaller budget"),
    ],
)
def test_impossible_mixed_precision_target_is_refused(
    bits, message, hint, tmp_path, base, capsys
):
    candidates = {"candidate_bits": [2, 3, 6]}
    run = make_run(
        tmp_path, base, mixed_precision=candidates | {"target_bpw": bits}, method="rtn"
    )
    assert run() == 2
    error = capsys.readouterr().err
    assert message in error
    assert hint in error
    if bits < 2:
        # The smallest one that the message names is possible, and no smaller one is.
        smallest = float(error.split("smallest possible is ")[1].split()[3])
        for target, code in ((smallest, 0), (smallest - 0.01, 2)):
            override = f"stages.1.quantize.mixed_precision.target_bpw={target}"
            assert run("--restart", override) == code


def test_sensitivities_are_cached(tmp_path, base):
    measured = []
    for bits in (4.0, 4.5):
        folder = tmp_path / f"{bits}"
        folder.mkdir()
        budget = {
            "target_bpw": bits,
            "candidate_bits": [3, 5],
            "candidate_group_sizes": [32, 64],
        }
        run = make_run(folder, base, mixed_precision=budget)
        assert run() == 0
        measured.append("measuring the sensitivity" in run.log)
        assert (run.output / "stages/1-quantize/sensitivity.json").is_file()
    assert measured == [True, False]
