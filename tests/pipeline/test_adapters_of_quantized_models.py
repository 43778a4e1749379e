"""Every adapter type, trained on dense and quantized models from the command line."""

import mlx.core as mx
import pytest
from lmx.models.loader import load
from tiny_checkpoints import QWEN3_MOE
from tiny_runs import METRICS_ONLY, TRAIN, Run

GRID = {"bits": 2, "group_size": 32}
ADAPTER = {"adapter": {"rank": 4}}
ADAPTERS = {
    "lora": {"rank": 8, "use_rslora": True, "loraplus_lr_ratio": 4.0, "dropout": 0.1},
    "dora": {"type": "dora", "target_modules": {"mlp.*": 4, "*": 8}, "num_layers": 1},
}


@pytest.fixture(scope="module")
def quantized_model(tmp_path_factory, base):
    """The folder of the trained tiny model, quantized to 2 bits."""
    run = Run(tmp_path_factory.mktemp("coded"), {"quantize": GRID}, model=base)
    assert run() == 0
    return run.output / "stages" / "1-quantize" / "model"


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_improvement_survives_dense_export_only(
    tmp_path, quantized_model, adapter
):
    """The model that is trained is then quantized again; mlx-lm loads the dense one."""
    import mlx_lm

    train = TRAIN | {"learning_rate": 1e-3, "adapter": ADAPTERS[adapter]}
    stages = {"train": train}, {"quantize": GRID}, {"evaluate": METRICS_ONLY}
    run = Run(tmp_path, *stages, model=quantized_model)
    assert run() == 0
    improvement = run.json("report.json")["training"]["improvement"]
    assert improvement["in_training"] > 0.01
    exported = pytest.approx(improvement["exported"], abs=1e-3)
    assert improvement["in_training"] == exported
    assert "fused into its dequantized weights" in run.log
    base, dense, requantized = run.json("report.json")["models"].values()
    assert base["loss"] - dense["loss"] == exported
    # The update is smaller than a grid step in part of the weights.
    assert base["loss"] - requantized["loss"] < 0.9 * improvement["exported"]
    assert dense["bits_per_weight"] == 16
    folder = run.output / "stages/1-train/dense"
    tokens = mx.array([[5, 80, 200, 7, 33, 120]])
    mlx_lm_logits = mlx_lm.load(str(folder))[0](tokens).astype(mx.float32)
    logits, base_logits = (
        load(f, compute="float32").model(tokens) for f in (folder, quantized_model)
    )
    assert mx.abs(mlx_lm_logits - logits).max().item() < 0.05
    assert mx.abs(logits - base_logits).max().item() > 0.1


def test_adapter_trained_on_mxfp8_layers(tmp_path, base):
    """A recipe that quantizes, then trains: dense embeddings, the adapter fused into
    the dequantized weights, bit for bit."""
    quantize = {"method": "rtn", "mode": "mxfp8", "overrides": {"*embed*": "skip"}}
    train = TRAIN | ADAPTER | {"learning_rate": 1e-2}
    run = Run(tmp_path, {"quantize": quantize}, {"train": train}, model=base)
    assert run() == 0
    codes, dense = (
        mx.load(str(run.output / "stages" / name / "model.safetensors"))
        for name in ("1-quantize/model", "2-train/dense")
    )
    adapter = mx.load(str(run.output / "adapters/adapters.safetensors"))
    name = "model.embed_tokens.weight"
    assert mx.array_equal(dense[name], mx.load(f"{base}/model.safetensors")[name])
    grid = {"mode": "mxfp8", "group_size": 32, "bits": 8, "dtype": mx.float32}
    for path in {key.rpartition(".")[0] for key in adapter}:
        stored = [codes[f"{path}.{leaf}"] for leaf in ("weight", "scales")]
        weight = mx.dequantize(*stored, **grid)
        a, b = adapter[f"{path}.lora_a"], adapter[f"{path}.lora_b"]
        fused = mx.addmm(weight, b.T, a.T, alpha=2.0)
        written = dense[f"{path}.weight"]
        assert mx.array_equal(fused.astype(written.dtype), written), path
        assert not mx.array_equal(weight.astype(written.dtype), written)
    facts = run.json("manifest.json")["stages"]["2-train"]["result"]["facts"]
    assert facts["improvement"]["in_training"] > 0.01
    exported = pytest.approx(facts["improvement"]["in_training"], abs=1e-3)
    assert facts["improvement"]["exported"] == exported


def test_adapter_of_experts_and_embedding(tmp_path, make_checkpoint):
    adapter = {"rank": 4, "target_modules": ["*", "model.embed_tokens"]}
    train = TRAIN | {"adapter": adapter, "learning_rate": 1e-2}
    stages = {"train": train}, {"evaluate": METRICS_ONLY}
    run = Run(tmp_path, *stages, model=make_checkpoint(QWEN3_MOE, num_hidden_layers=1))
    assert run() == 0
    improvement = run.json("report.json")["training"]["improvement"]
    assert improvement["exported"] > 0.1
    names = mx.load(str(run.output / "adapters" / "adapters.safetensors"))
    assert "model.embed_tokens.lora_b" in names
    assert "model.layers.0.mlp.switch_mlp.up_proj.lora_a" in names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "a quantized model cannot be trained in full"),
        (
            ADAPTER | {"qat": GRID | {"quantizer": "minmax"}},
            "the model is quantized here, and minmax would quantize it again",
        ),
        (
            {"adapter": {"type": "dora"}, "qat": GRID},
            "a dora adapter does not work with qat",
        ),
    ],
)
def test_invalid_adapter_of_quantized_model_is_refused(
    tmp_path, quantized_model, capsys, change, message
):
    run = Run(tmp_path, {"train": TRAIN | change}, model=quantized_model)
    assert run() == 2
    assert message in capsys.readouterr().err
