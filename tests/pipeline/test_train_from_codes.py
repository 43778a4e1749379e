"""Training that starts from the codes of a quantized model, from the command line."""

import signal
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from lmx.models.loader import load
from tiny_checkpoints import QWEN3_MOE
from tiny_runs import METRICS_ONLY, TRAIN, Run

GRID = {"bits": 2, "group_size": 32}
GPTQ = GRID | {
    "method": "gptq",
    # The test only needs codes, scales and biases that differ from those of RTN.
    "refine_iters": 1,
    "output_hessian": False,
    "calibration": {"num_tokens": 512, "max_seq_length": 64, "num_eval_tokens": 64},
    "scale_tuning": {"steps": 2, "batch_tokens": 64, "learning_rate": 1e-3},
    "rollback_if_worse": False,
}
TRAINING = TRAIN | {"learning_rate": 5e-3}
FROZEN = TRAIN | {"steps": 1, "learning_rate": 1e-30}
MODES = {
    "lsq": {"qat": GRID | {"quantizer": "lsq"}},
    "lora": {"qat": GRID | {"quantizer": "lsq"}, "adapter": {"rank": 4}},
    "fixed_scale": {"qat": GRID | {"quantizer": "fixed_scale"}},
    "lora_minmax": {"qat": GRID, "adapter": {"rank": 4}},
}
# The tensors that a mode does not change.
UNCHANGED = {
    "lsq": set(),
    "lora": set(),
    "fixed_scale": {"scales", "biases"},
    "lora_minmax": {"scales", "biases"},
}
TOKENS = mx.array([[5, 80, 200, 7, 33, 120]])


def quantized(run):
    return run.output / "stages" / "1-quantize" / "model"


def trained(run, name="model"):
    return run.output / "stages" / "2-train" / name


def tensors(folder):
    return mx.load(str(folder / "model.safetensors"))


def count_changed(before, after):
    """How many 2-bit codes differ, and how many there are."""
    words = [
        np.array([before[name], after[name]])
        for name in before
        if f"{name.removesuffix('.weight')}.scales" in before
        and name.endswith(".weight")
    ]
    places = [(pair[..., None] >> np.arange(0, 32, 2)) & 3 for pair in words]
    changed = sum(int((codes[0] != codes[1]).sum()) for codes in places)
    return changed, sum(codes[0].size for codes in places)


def mlx_lm_logits(folder):
    """Logits of the model that mlx-lm loads."""
    import mlx_lm

    return mlx_lm.load(str(folder))[0](TOKENS)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory, base):
    """A function from a mode to its cached run on an RTN-quantized model."""

    @cache
    def run_of_mode(mode):
        train = {"train": TRAINING | MODES[mode]}
        stages = {"quantize": GRID}, train, {"evaluate": METRICS_ONLY}
        run = Run(tmp_path_factory.mktemp("gained"), *stages, model=base)
        assert run() == 0
        return run

    return run_of_mode


@pytest.mark.parametrize("mode", MODES)
def test_training_without_updates_keeps_the_codes(tmp_path, base, mode):
    """Tensors and logits are bitwise equal."""
    stages = {"quantize": GPTQ}, {"train": FROZEN | MODES[mode]}
    run = Run(tmp_path, *stages, model=base)
    assert run() == 0
    before, after = tensors(quantized(run)), tensors(trained(run))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype, name
        assert mx.array_equal(value, after[name]), name
    assert mx.array_equal(mlx_lm_logits(quantized(run)), mlx_lm_logits(trained(run)))
    assert "warning: training has changed only 0 of" in run.log
    # The reference is the recipe's model, from which the codes were quantized.
    assert not trained(run, "dense").exists()
    reference = run.json("manifest.json")["stages"]["2-train"]["result"]["reference"]
    assert reference is None


@pytest.mark.parametrize("mode", MODES)
def test_training_from_codes_improves_exported_loss(trained_run, mode):
    run = trained_run(mode)
    assert "training continues from the codes of 15 layers" in run.log
    improvement = run.json("report.json")["training"]["improvement"]
    assert improvement["in_training"] > 0.01
    assert improvement["exported"] == pytest.approx(
        improvement["in_training"], abs=2e-3
    )
    logits = load(trained(run), compute="float32").model(TOKENS)
    assert (
        mx.abs(logits - mlx_lm_logits(trained(run)).astype(mx.float32)).max().item()
        < 0.05
    )
    before, after = tensors(quantized(run)), tensors(trained(run))
    facts = run.json("report.json")["training"]
    changed, total = count_changed(before, after)
    assert facts["changed_codes"] == changed > 0
    # LoRA does not train the embedding.
    assert total / 2 < facts["codes"] <= total
    assert f"training has changed {changed:,} of {facts['codes']:,}" in run.log
    cell = f"<td>{changed:,} of {facts['codes']:,}</td>"
    assert cell in (run.output / "report.html").read_text()
    assert {k: v.dtype for k, v in before.items()} == {
        k: v.dtype for k, v in after.items()
    }
    path = "model.layers.0.mlp.up_proj"
    for name in ("weight", "scales", "biases"):
        same = mx.array_equal(before[f"{path}.{name}"], after[f"{path}.{name}"])
        assert same == (name in UNCHANGED[mode]), name


def test_training_from_codes_resumes_after_kill(tmp_path, base, trained_run):
    stages = {"quantize": GRID}, {"train": TRAINING | MODES["lora_minmax"]}
    run = Run(tmp_path, *stages, model=base)
    assert run.run_with_signal("SIGKILL", "step", 8).returncode == -signal.SIGKILL
    assert run() == 0
    assert "resuming after step 6" in run.log
    assert run.outcome() == trained_run("lora_minmax").outcome()


@pytest.mark.slow
def test_training_from_codes_of_an_imported_model(tmp_path, make_checkpoint):
    """Without the original weights, the reference has the dequantized codes."""
    first = Run(tmp_path, {"quantize": GRID}, model=make_checkpoint(QWEN3_MOE))
    assert first() == 0
    folder = quantized(first)
    (tmp_path / "on").mkdir()
    train = FROZEN | MODES["lsq"]
    stages = {"train": train}, {"evaluate": METRICS_ONLY}
    run = Run(tmp_path / "on", *stages, model=folder)
    assert run() == 0
    assert [*run.json("report.json")["models"]] == ["base", "dequantized", "quantized"]
    stage = run.output / "stages" / "1-train"
    before, after = tensors(folder), tensors(stage / "model")
    assert before.keys() == after.keys()
    assert all(mx.array_equal(v, after[k]) for k, v in before.items())
    dense_logits, code_logits = (
        load(f, compute="float32").model(TOKENS) for f in (stage / "dense", folder)
    )
    assert mx.abs(dense_logits - code_logits).max().item() < 0.05


@pytest.mark.parametrize(
    ("qat", "message"),
    [
        (
            {"bits": 3, "group_size": 64, "quantizer": "lsq"},
            "quantized here with bits: 2, group_size: 32; this block has bits: 3, "
            "group_size: 64",
        ),
        (
            GRID | {"quantizer": "lsq", "quantize_lm_head": False},
            "with quantize_lm_head: True; this block has",
        ),
        (GRID, "minmax would quantize it again"),
        (
            GRID | {"quantizer": "lsq", "fake_quant_after_n_steps": 3},
            "leave fake_quant_after_n_steps out",
        ),
    ],
)
def test_conflicting_quantization_is_refused_before_training(
    tmp_path, base, capsys, qat, message
):
    stages = {"quantize": GRID}, {"train": TRAIN | {"qat": qat}}
    run = Run(tmp_path, *stages, model=base)
    assert run() == 2
    assert message in capsys.readouterr().err
    assert not run.output.exists()
