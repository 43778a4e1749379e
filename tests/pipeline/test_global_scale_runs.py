"""Experts with a global scale: quantized and trained from the command line."""

import mlx.core as mx
import mlx_lm
import pytest
from lmx.models.loader import load
from tiny_checkpoints import QWEN3_MOE
from tiny_global_scale import dequantized
from tiny_runs import METRICS_ONLY, TRAIN, Run

GRID = {"mode": "nvfp4", "global_scale": True}
TRAINING = TRAIN | {"learning_rate": 5e-3}
MODES = {
    "qat": {"qat": GRID},
    "lora": {"adapter": {"rank": 4, "target_modules": ["mlp.switch_mlp.*"]}},
    "qat_lora": {
        "qat": GRID,
        "adapter": {"rank": 4, "target_modules": ["self_attn.*"]},
    },
}
NAMES = ("up_proj", "gate_proj", "down_proj")
PATHS = [f"model.layers.0.mlp.switch_mlp.{name}" for name in NAMES]


def tensors(folder):
    return mx.load(str(folder / "model.safetensors"))


@pytest.mark.parametrize(
    "name",
    ["qat", *(pytest.param(n, marks=pytest.mark.slow) for n in ("lora", "qat_lora"))],
)
def test_training_from_experts_with_a_global_scale(name, tmp_path, make_checkpoint):
    source = make_checkpoint(QWEN3_MOE, num_hidden_layers=1, dtype="float32")
    stages = {"quantize": GRID}, {"train": TRAINING | MODES[name]}
    run = Run(tmp_path, *stages, {"evaluate": METRICS_ONLY}, model=source)
    assert run() == 0
    folders = [run.output / "stages" / part for part in ("1-quantize", "2-train")]
    before = tensors(folders[0] / "model")
    after = tensors(folders[1] / ("dense" if name == "lora" else "model"))
    improvement = run.json("report.json")["training"]["improvement"]
    assert improvement["in_training"] > 0.3
    # The trained weights are those that are served.
    exported = pytest.approx(improvement["exported"], abs=1e-4)
    assert improvement["in_training"] == exported
    adapter = name != "qat" and mx.load(
        str(run.output / "adapters/adapters.safetensors")
    )
    for path in PATHS:
        if name == "lora":
            a, b = adapter[f"{path}.lora_a"], adapter[f"{path}.lora_b"]
            fused = dequantized(before, path) + 2.0 * (b @ a)
            assert mx.allclose(after[f"{path}.weight"], fused, rtol=1e-5, atol=1e-7)
            continue
        for leaf in ("scales", "global_scale"):
            assert mx.array_equal(after[f"{path}.{leaf}"], before[f"{path}.{leaf}"])
        same = mx.array_equal(after[f"{path}.weight"], before[f"{path}.weight"]).item()
        assert same == (name == "qat_lora")
    if name != "lora":
        stock, _ = mlx_lm.load(str(folders[1] / "model"))
        layer = stock.layers[0].mlp.switch_mlp.up_proj
        assert mx.array_equal(layer.global_scale, after[f"{PATHS[0]}.global_scale"])
        logits = load(folders[1] / "model").model(mx.arange(12)[None])
        assert mx.isfinite(logits).all()


def test_a_block_without_the_global_scale_of_the_model_is_refused(
    tmp_path, make_checkpoint, capsys
):
    source = make_checkpoint(QWEN3_MOE, num_hidden_layers=1, dtype="float32")
    train = TRAINING | {"qat": {"mode": "nvfp4"}}
    run = Run(tmp_path, {"quantize": GRID}, {"train": train}, model=source)
    assert run() == 2
    message = (
        "quantized here with global_scale: True; this block has global_scale: False"
    )
    assert message in capsys.readouterr().err
