"""Runs with quantized activations compute what mlx-lm will compute."""

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from lmx.config.train import TrainConfig
from lmx.data.batching import BucketBatchSampler
from lmx.data.dataset import RecordReader
from lmx.data.tokenization import encode_all
from lmx.errors import UserError
from lmx.evaluation.perplexity import measure_perplexity
from lmx.files.hashes import hash_file
from lmx.interfaces import Logger
from lmx.models.checkpoint import read_config
from lmx.models.checkpoint_writer import write_checkpoint
from lmx.models.loader import load
from lmx.models.quantized_layers import QQLinear, full_precision_inputs
from lmx.pipeline.train.qat import prepare
from lmx.quantization.ptq.channel_scales import channel_scales
from mlx.utils import tree_flatten
from tiny_runs import METRICS_ONLY, TRAIN, Run

GRID = {"mode": "nvfp4", "quantize_activations": True}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory, base):
    folder = tmp_path_factory.mktemp("quantized")
    export = {"export": {"formats": ["mlx", "hf"]}}
    run = Run(folder, {"quantize": GRID}, {"evaluate": METRICS_ONLY}, export)
    run.model = str(base)
    run.write()
    assert run() == 0
    return run


@pytest.fixture(scope="module")
def with_outliers(tmp_path_factory, base):
    """The same model, in which one channel of every group has large inputs."""
    loaded = load(base, compute="stored")
    weights = dict(tree_flatten(loaded.model.parameters()))
    factors = mx.where(mx.arange(64) % 16 == 3, 64.0, 1.0).astype(loaded.dtype)
    readers = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    for name, weight in weights.items():
        if name.endswith("layernorm.weight"):
            weights[name] = weight * factors
        elif name.split(".")[-2] in readers:
            weights[name] = weight / factors
    folder = tmp_path_factory.mktemp("outliers") / "model"
    folder.mkdir()
    write_checkpoint(folder, weights, loaded.config, companions=base)
    return folder


def layers(model, layer_class) -> set[str]:
    return {p for p, m in model.named_modules() if type(m) is layer_class}


def test_mlx_lm_loads_layers_that_quantize_their_inputs(quantized):
    ours = load(quantized.output / "model").model
    stock, _ = mlx_lm.load(str(quantized.output / "model"))
    paths = layers(stock, nn.QQLinear)
    assert paths == layers(ours, QQLinear)
    assert {path.rpartition(".")[2] for path in paths} >= {"q_proj", "down_proj"}
    # One token: MLX's CPU backend has no product of more rows.
    for token in (5, 60, 200):
        inputs = mx.array([[token]])
        expected = stock(inputs).astype(mx.float32)
        assert mx.allclose(ours(inputs), expected, rtol=1e-3, atol=1e-3)
        with full_precision_inputs(ours):
            assert not mx.allclose(ours(inputs), expected, rtol=1e-2, atol=1e-2)


def test_report_has_the_divergence_with_and_without(quantized):
    models = quantized.json("report.json")["models"]
    figures = models["quantized"]
    assert figures["kl_mean"] > 1.1 * figures["kl_mean_weights_only"] > 0
    assert "kl_mean_weights_only" not in models["base"]
    assert "KL, activations not quantized" in quantized.log
    records = [*RecordReader(str(quantized.folder / "valid.jsonl"), split="train")]
    loaded = load(quantized.output / "model")
    examples = encode_all(records, loaded.tokenizer, max_seq_length=64).examples
    batches = [
        *BucketBatchSampler(examples, max_seq_length=64, batch_tokens=4096).in_order()
    ]
    perplexity = measure_perplexity(loaded.model, batches).value
    assert perplexity == pytest.approx(figures["perplexity"], rel=1e-4)


def test_exports_say_whether_activations_are_quantized(quantized):
    configs = [read_config(quantized.output / name) for name in ("model", "hf")]
    assert [c.get("quantize_activations") for c in configs] == [True, None]
    card = (quantized.output / "model/README.md").read_text()
    assert "mlx_lm.generate --quantize-activations --model" in card
    assert "--quantize" not in (quantized.output / "hf/README.md").read_text()


@pytest.mark.parametrize(
    "adapter", [{"rank": 4}, pytest.param(None, marks=pytest.mark.slow)]
)
def test_training_has_the_loss_of_the_served_model(tmp_path, base, adapter):
    train = TRAIN | {"steps": 4, "learning_rate": 1e-3, "qat": GRID}
    if adapter:
        train["adapter"] = adapter
    run = Run(tmp_path, {"train": train}, model=base)
    assert run() == 0
    improvement = run.json("manifest.json")["stages"]["1-train"]["result"]["facts"][
        "improvement"
    ]
    exported = improvement["exported"]
    assert improvement["in_training"] == pytest.approx(exported, abs=2e-3)
    served = load(run.output / "stages/1-train/model").model
    assert layers(served, QQLinear)


def test_model_with_quantized_activations_is_not_trained(
    tmp_path, base, quantized, capsys
):
    train = TRAIN | {"adapter": {"rank": 4}}
    exported = quantized.output / "model"
    for stages, model in (
        ([{"train": train}], exported),
        ([{"quantize": GRID}, {"train": train}], base),
    ):
        assert Run(tmp_path, *stages, model=model)() == 2
        assert "the model quantizes its activations here" in capsys.readouterr().err
    # A model of the Hub is not known before it is loaded.
    loaded = load(exported, compute="stored")
    with pytest.raises(UserError, match="this model quantizes its activations"):
        prepare(TrainConfig(**train), loaded, Logger())


def quantize(folder, model, *stages, **keys) -> Run:
    folder.mkdir()
    run = Run(folder, {"quantize": GRID | keys}, *stages, model=model)
    assert run() == 0
    return run


def facts_of(run) -> dict:
    return run.json("manifest.json")["stages"]["1-quantize"]["result"]["facts"]


@pytest.mark.slow
def test_smoothing_removes_the_cost_of_outliers_in_gptq(tmp_path, with_outliers):
    kl = []
    for name, keys in (("plain", {"smoothing_strength": 0}), ("smoothed", {})):
        keys |= {"method": "gptq", "effort": "fast"}
        evaluate = {"evaluate": METRICS_ONLY}
        run = quantize(tmp_path / name, with_outliers, evaluate, **keys)
        kl.append(run.json("report.json")["models"]["quantized"]["kl_mean"])
    assert kl[1] < 0.1 * kl[0]


def test_smoothing_is_kept_if_it_is_better(tmp_path, base, with_outliers, monkeypatch):
    keys = {"smoothing_strength": 0.5}
    facts = facts_of(quantize(tmp_path / "outliers", with_outliers, **keys))
    kl = facts["eval_kl"]
    assert facts["selected_candidate"] == "smoothquant"
    assert kl["smoothquant"] < 0.1 * kl["rtn"]
    # The candidates quantize their activations: without this, RTN has little error.
    with monkeypatch.context() as patch:
        patch.setattr(QQLinear, "quantizes_input", False)
        weights_only = quantize(tmp_path / "weights", with_outliers, **keys)
    assert facts_of(weights_only)["eval_kl"]["rtn"] < 0.1 * kl["rtn"]
    # Scales that make outliers are rolled back, those of the norms too.
    bad_scale = mx.where(mx.arange(64) % 16 == 3, 1 / 64, 1.0)
    monkeypatch.setattr(channel_scales, "smoothing_scale", lambda *_: bad_scale)
    run = quantize(tmp_path / "worse", base, **keys)
    assert facts_of(run)["selected_candidate"] == "rtn"
    plain = quantize(tmp_path / "plain", base, smoothing_strength=0)
    models = [r.output / "stages/1-quantize/model" for r in (run, plain)]
    hashes = [hash_file(model / "model.safetensors") for model in models]
    assert hashes[0] == hashes[1]


def test_scales_of_awq_come_after_those_of_smoothing(tmp_path, with_outliers):
    """Norms have both, although they are not quantized."""
    run = quantize(tmp_path / "awq", with_outliers, method="awq")
    kl = facts_of(run)["eval_kl"]
    assert kl["awq"] < 0.1 * kl["rtn"]


@pytest.mark.slow
def test_qat_goes_on_from_smoothed_codes(tmp_path, with_outliers):
    train = {"train": TRAIN | {"steps": 4, "learning_rate": 1e-4, "qat": GRID}}
    losses = []
    for strength in (0, 0.5):
        keys = {"smoothing_strength": strength}
        run = quantize(tmp_path / f"{strength}", with_outliers, train, **keys)
        stage = run.json("manifest.json")["stages"]["2-train"]["result"]
        improvement = stage["facts"]["improvement"]
        exported = improvement["exported"]
        assert improvement["in_training"] == pytest.approx(exported, abs=3e-3)
        losses.append([r["loss"] for r in run.records() if r["kind"] == "valid"])
        served = load(run.output / "stages/2-train/model").model
        assert layers(served, QQLinear)
    assert max(losses[1]) < min(losses[0]) - 0.2
