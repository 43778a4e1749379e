"""Training from the codes of floating-point modes, from the command line."""

import signal
from functools import cache

import mlx.core as mx
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.models.loader import load
from lmx.models.quantized_layers import has_quantized_inputs
from lmx.quantization.packing import dequantize
from tiny_runs import METRICS_ONLY, TRAIN, Run

W4A4 = {"mode": "nvfp4", "quantize_activations": True}
TRAINING = TRAIN | {"learning_rate": 5e-3}
MODES = {
    "mxfp4": {"qat": {"mode": "mxfp4"}},
    "lora": {"qat": {"mode": "mxfp8"}, "adapter": {"rank": 4}},
    "W4A4": {"qat": W4A4},
}


def tensors(folder):
    return mx.load(str(folder / "model.safetensors"))


def weights(folder, mode):
    """Dequantized weights by path."""
    stored = tensors(folder)
    paths = [k.removesuffix(".scales") for k in stored if k.endswith(".scales")]
    names = ("weight", "scales")
    return {
        path: dequantize(
            {n: stored[f"{path}.{n}"] for n in names}, QuantSpec(mode=mode), mx.float16
        )
        for path in paths
    }


def folders(run):
    stages = run.output / "stages"
    return stages / "1-quantize" / "model", stages / "2-train" / "model"


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory, base):
    @cache
    def run_of(name):
        settings = MODES[name]
        stages = {"quantize": settings["qat"]}, {"train": TRAINING | settings}
        folder = tmp_path_factory.mktemp(name)
        run = Run(folder, *stages, {"evaluate": METRICS_ONLY}, model=base)
        assert run() == 0
        return run

    return run_of


@pytest.mark.parametrize(
    "name",
    ["mxfp4", *(pytest.param(n, marks=pytest.mark.slow) for n in ("lora", "W4A4"))],
)
def test_training_changes_codes_and_keeps_scales(trained_run, name):
    run = trained_run(name)
    assert "training continues from the codes of 15 layers" in run.log
    before, after = map(tensors, folders(run))
    assert before.keys() == after.keys()
    for key, value in before.items():
        if key.endswith(".scales"):
            assert mx.array_equal(value, after[key]), key
    facts = run.json("report.json")["training"]
    mode = MODES[name]["qat"]["mode"]
    weights_before, weights_after = (weights(f, mode) for f in folders(run))
    differences = [(v != weights_after[k]).sum() for k, v in weights_before.items()]
    assert facts["changed_codes"] == sum(differences).item() > 0
    improvement = facts["improvement"]
    assert improvement["in_training"] > 0.005
    exported = improvement["exported"]
    assert improvement["in_training"] == pytest.approx(exported, abs=2e-3)
    served = load(folders(run)[1])
    assert has_quantized_inputs(served.model) == (name == "W4A4")


@pytest.mark.parametrize("name", [pytest.param("mxfp4", marks=pytest.mark.slow)])
def test_training_resumes_after_kill(tmp_path, base, trained_run, name):
    stages = {"quantize": MODES[name]["qat"]}, {"train": TRAINING | MODES[name]}
    run = Run(tmp_path, *stages, model=base)
    assert run.run_with_signal("SIGKILL", "step", 8).returncode == -signal.SIGKILL
    assert run() == 0
    assert "resuming after step 6" in run.log
    assert run.outcome() == trained_run(name).outcome()


@pytest.mark.parametrize(
    ("name", "latent_init"),
    [("mxfp4", "random"), pytest.param("lora", "codes", marks=pytest.mark.slow)],
)
def test_training_without_updates_keeps_the_weights(
    tmp_path, trained_run, name, latent_init
):
    """Of a model of unknown origin: the reference has the dequantized codes."""
    start = folders(trained_run(name))[0]
    settings = MODES[name] | {"qat": MODES[name]["qat"] | {"latent_init": latent_init}}
    train = TRAIN | {"steps": 1, "learning_rate": 1e-30} | settings
    run = Run(tmp_path, {"train": train}, model=start)
    assert run() == 0
    assert "training has changed only 0 of" in run.log
    stage, mode = run.output / "stages" / "1-train", settings["qat"]["mode"]
    after, dense = weights(stage / "model", mode), tensors(stage / "dense")
    for path, value in weights(start, mode).items():
        assert mx.array_equal(value, after[path]), path
        assert mx.array_equal(value, dense[f"{path}.weight"]), path
