"""Adapters of every kind through the command line, on dense and quantized bases."""

import mlx.core as mx
import pytest
from lmx.models.loader import load
from tiny_checkpoints import QWEN3_MOE
from tiny_runs import MEASURE, TRAIN, Run

GRID = {"bits": 2, "group_size": 32}
ADAPTERS = {
    "lora": {"rank": 8, "use_rslora": True, "loraplus_lr_ratio": 4.0, "dropout": 0.1},
    "dora": {"type": "dora", "target_modules": {"mlp.*": 4, "*": 8}, "num_layers": 1},
}


@pytest.fixture(scope="module")
def coded(tmp_path_factory, base):
    """The trained tiny model in two bits."""
    run = Run(tmp_path_factory.mktemp("coded"), {"quantize": GRID}, model=base)
    assert run() == 0
    return run.output / "stages" / "1-quantize" / "model"


@pytest.fixture(scope="module", params=ADAPTERS)
def tuned(request, tmp_path_factory, coded):
    """Adapters trained on codes, and what is left of them when it is rounded again."""
    train = TRAIN | {"learning_rate": 1e-3, "adapter": ADAPTERS[request.param]}
    stages = {"train": train}, {"quantize": GRID}, {"evaluate": MEASURE}, "export"
    run = Run(tmp_path_factory.mktemp(request.param), *stages, model=coded)
    assert run() == 0
    return run


def test_adapter_improvement_survives_dense_export_only(tuned):
    gain = tuned.json("report.json")["training"]["improvement"]
    assert gain["in_training"] > 0.01
    assert gain["exported"] == pytest.approx(gain["in_training"], abs=1e-3)
    assert "fused into its dequantized weights" in tuned.log
    base, dense, again = tuned.json("report.json")["models"].values()
    assert base["loss"] - dense["loss"] == pytest.approx(gain["exported"], abs=1e-3)
    # Part of so small an update is less than a step of the grid.
    assert base["loss"] - again["loss"] < 0.9 * gain["exported"]
    assert dense["bits_per_weight"] == 16


def test_mlx_lm_loads_the_fused_model(tuned, coded):
    import mlx_lm

    folder = tuned.output / "stages/1-train/dense"
    tokens = mx.array([[5, 80, 200, 7, 33, 120]])
    stock = mlx_lm.load(str(folder))[0](tokens).astype(mx.float32)
    own, plain = (load(f, compute="float32").model(tokens) for f in (folder, coded))
    assert mx.abs(stock - own).max().item() < 0.05
    assert mx.abs(own - plain).max().item() > 0.1


def test_adapter_of_experts_and_embedding(tmp_path, make_checkpoint):
    adapter = {"rank": 4, "target_modules": ["*", "model.embed_tokens"]}
    train = TRAIN | {"adapter": adapter, "learning_rate": 1e-2}
    stages = {"train": train}, {"evaluate": MEASURE}
    run = Run(tmp_path, *stages, model=make_checkpoint(QWEN3_MOE, num_hidden_layers=1))
    assert run() == 0
    gain = run.json("report.json")["training"]["improvement"]
    assert gain["exported"] > 0.1
    names = mx.load(str(run.output / "adapters" / "adapters.safetensors"))
    assert "model.embed_tokens.lora_b" in names
    assert "model.layers.0.mlp.switch_mlp.up_proj.lora_a" in names


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "a quantized model cannot be trained in full"),
        (
            {"adapter": {"rank": 4}, "qat": GRID | {"quantizer": "seq"}},
            "the model is quantized here, and seq would quantize it again",
        ),
        (
            {"adapter": {"type": "dora"}, "qat": GRID},
            "a dora adapter does not work with qat",
        ),
        (
            {"adapter": {"type": "qa_lora"}, "qat": GRID},
            "a qa_lora adapter does not change the codes of the model",
        ),
        (
            {"adapter": {"type": "qa_lora", "init_from": "adapters"}},
            "a qa_lora adapter is saved as a plain LoRA adapter",
        ),
    ],
)
def test_invalid_adapter_of_quantized_model_is_refused(
    tmp_path, coded, capsys, change, said
):
    run = Run(tmp_path, {"train": TRAIN | change}, model=coded)
    assert run() == 2
    assert said in capsys.readouterr().err
