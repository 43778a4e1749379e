"""Every adapter type, trained on dense and quantized models from the command line."""

import mlx.core as mx
import pytest
from lmx.models.loader import load
from tiny_checkpoints import QWEN3_MOE
from tiny_runs import METRICS_ONLY, TRAIN, Run

GRID = {"bits": 2, "group_size": 32}
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


@pytest.fixture(scope="module", params=ADAPTERS)
def tuned_run(request, tmp_path_factory, quantized_model):
    """A run that trains an adapter on a quantized model, then quantizes the result."""
    train = TRAIN | {"learning_rate": 1e-3, "adapter": ADAPTERS[request.param]}
    stages = {"train": train}, {"quantize": GRID}, {"evaluate": METRICS_ONLY}, "export"
    run = Run(tmp_path_factory.mktemp(request.param), *stages, model=quantized_model)
    assert run() == 0
    return run


def test_adapter_improvement_survives_dense_export_only(tuned_run):
    improvement = tuned_run.json("report.json")["training"]["improvement"]
    assert improvement["in_training"] > 0.01
    assert improvement["exported"] == pytest.approx(
        improvement["in_training"], abs=1e-3
    )
    assert "fused into its dequantized weights" in tuned_run.log
    base, dense, requantized = tuned_run.json("report.json")["models"].values()
    assert base["loss"] - dense["loss"] == pytest.approx(
        improvement["exported"], abs=1e-3
    )
    # The update is smaller than a grid step in part of the weights.
    assert base["loss"] - requantized["loss"] < 0.9 * improvement["exported"]
    assert dense["bits_per_weight"] == 16


def test_mlx_lm_loads_the_fused_model(tuned_run, quantized_model):
    import mlx_lm

    folder = tuned_run.output / "stages/1-train/dense"
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
    train = TRAIN | {"adapter": {"rank": 4}, "learning_rate": 1e-2}
    run = Run(tmp_path, {"quantize": quantize}, {"train": train}, model=base)
    assert run() == 0
    folders = (run.output / "stages" / name for name in ("1-quantize", "2-train"))
    codes, dense = (
        mx.load(str(folder / model / "model.safetensors"))
        for folder, model in zip(folders, ("model", "dense"), strict=True)
    )
    adapter = mx.load(str(run.output / "adapters/adapters.safetensors"))
    name = "model.embed_tokens.weight"
    assert mx.array_equal(dense[name], mx.load(f"{base}/model.safetensors")[name])
    for path in {key.rpartition(".")[0] for key in adapter}:
        weight = mx.dequantize(
            codes[f"{path}.weight"],
            codes[f"{path}.scales"],
            mode="mxfp8",
            group_size=32,
            bits=8,
            dtype=mx.float32,
        )
        a, b = adapter[f"{path}.lora_a"], adapter[f"{path}.lora_b"]
        fused = mx.addmm(weight, b.T, a.T, alpha=2.0)
        stored = dense[f"{path}.weight"]
        assert mx.array_equal(fused.astype(stored.dtype), stored), path
        assert not mx.array_equal(weight.astype(stored.dtype), stored)
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
            {"adapter": {"rank": 4}, "qat": GRID | {"quantizer": "minmax"}},
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
