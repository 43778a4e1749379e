"""Runs of all stages from the command line: reports, artifacts, loading in mlx-lm."""

import math
import re
from collections import defaultdict
from functools import cache

import mlx.core as mx
import pytest
from lmx.files.hashes import hash_folder
from lmx.generation.generator import Generator
from lmx.models.loader import load
from lmx.models.lora import lora_model
from mlx.utils import tree_flatten
from page_data import rows, sections
from test_report_of_runs import page
from tiny_checkpoints import QWEN3_MOE
from tiny_runs import EVALUATE, TRAIN, Run

LORA = {"type": "lora", "rank": 8}
BARS = "(?:training|validation|quantization|evaluating)"
GRID = {"bits": 4, "group_size": 32}
NAMES = ["1-train", "2-quantize", "3-evaluate", "4-export"]
REQUIRED_KEYS = {
    "perplexity",
    "perplexity_stderr",
    "bits_per_weight",
    "bytes",
    "exact_match",
}
DIVERGENCE_KEYS = {"kl_mean", "kl_p99", "top1_agreement"}
SPECULATION_KEYS = {
    "acceptance_rate",
    "accepted_length",
    "speedup",
}
GENERATION_KEYS = {"ttft_ms", "prefill_tokens_per_second", "decode_tokens_per_second"}


@pytest.fixture(scope="session")
def finished(tmp_path_factory, base):
    """A function from a kind of training to its run of train, evaluate and export."""

    @cache
    def run_of_kind(kind):
        train = TRAIN | {"lr_schedule": "constant"} | KINDS[kind]
        stages = {"train": train}, {"evaluate": EVALUATE}, "export"
        run = Run(tmp_path_factory.mktemp(kind), *stages, model=base)
        assert run() == 0
        return run

    return run_of_kind


KINDS = {
    "lora": {"adapter": LORA | {"dropout": 0.1}, "learning_rate": 1e-2},
    "lora-qat": {"adapter": LORA, "qat": GRID, "learning_rate": 1e-2},
    "qat": {"qat": GRID},
}
MODEL_NAMES = {
    "lora": ["base", "fine-tuned"],
    "lora-qat": ["base", "fine-tuned", "quantized"],
    "qat": ["base", "fine-tuned", "quantized"],
}


def check_report(report, names):
    assert list(report["models"]) == names
    for name, metrics in report["models"].items():
        assert metrics.keys() >= REQUIRED_KEYS
        assert (metrics.keys() >= DIVERGENCE_KEYS) == (name != names[0])
        assert metrics["generation"].keys() == GENERATION_KEYS
        for percentiles in metrics["generation"].values():
            assert percentiles.keys() == {"p50", "p90", "p99"}
        assert metrics["speculation"].keys() == {"prompt_lookup"}
        speculation = metrics["speculation"]["prompt_lookup"]
        assert speculation.keys() == SPECULATION_KEYS
        assert speculation["speedup"] > 0
        values = [v for v in metrics.values() if isinstance(v, float)]
        assert all(map(math.isfinite, values))


def test_run_from_scratch_to_export(full_run):
    report = full_run.json("report.json")
    check_report(report, ["fine-tuned", "quantized"])
    fine_tuned, quantized = report["models"].values()
    assert fine_tuned["bits_per_weight"] == 16
    # 4-bit codes, plus a 16-bit scale and bias per group of 32. Norms are not counted.
    assert quantized["bits_per_weight"] == pytest.approx(5, abs=0.1)
    [*_, last] = [record for record in full_run.records() if record["kind"] == "valid"]
    assert fine_tuned["loss"] == pytest.approx(last["loss"], rel=1e-3)
    names = [threshold["name"] for threshold in report["thresholds"]]
    assert names == ["max_kl", "min_top1_agreement"]
    for threshold in report["thresholds"]:
        assert threshold.keys() == {"name", "value", "limit", "passed"}
        assert threshold["passed"]
    assert report["thresholds"][0]["value"] == quantized["kl_mean"]
    manifest = full_run.json("manifest.json")
    assert manifest["status"] == "done"
    assert list(manifest["stages"]) == NAMES
    measured = hash_folder(full_run.output / "stages/2-quantize/model")
    assert measured.items() <= hash_folder(full_run.output / "model").items()
    steps = [record["step"] for record in full_run.records("samples.jsonl")]
    assert steps == [0, 15, 30, 45]


@pytest.mark.parametrize("kind", KINDS)
def test_run_from_a_base_model(finished, kind):
    run = finished(kind)
    report = run.json("report.json")
    check_report(report, MODEL_NAMES[kind])
    # The improvement is that of the exported model, as measured in training.
    improvement = report["training"]["improvement"]
    exported, in_training = improvement["exported"], improvement["in_training"]
    base, *_, served = report["models"].values()
    assert exported == pytest.approx(base["loss"] - served["loss"], abs=1e-4)
    assert exported == pytest.approx(in_training, abs=1e-3)
    assert exported > 0.02
    assert (run.output / "adapters").is_dir() == ("adapter" in KINDS[kind])


def mlx_lm_texts(folder, prompts, count):
    """Texts of mlx-lm in float32, because 16-bit logits have near ties."""
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(folder))
    model.set_dtype(mx.float32)
    return [
        mlx_lm.generate(model, tokenizer, prompt, max_tokens=count)
        for prompt in prompts
    ]


@pytest.mark.parametrize("kind", ["full_run", *KINDS])
def test_mlx_lm_logits_match(full_run, finished, kind):
    run = full_run if kind == "full_run" else finished(kind)
    folder = run.output / "model"
    loaded = load(folder, compute="float32")
    generator = Generator(loaded.model, loaded.tokenizer)
    prompts = [generator.encode_chat(f"Add {n} and 1.") for n in (1, 22, 333)]
    texts = [generator.generate(p, max_tokens=12).text for p in prompts]
    assert texts == mlx_lm_texts(folder, prompts, 12)
    assert all(len(text) > 10 for text in texts)


def test_mlx_lm_loads_the_adapter(finished, base):
    """The base model with the adapter equals the fused export."""
    import mlx_lm

    run = finished("lora")
    adapted, _ = mlx_lm.load(str(base), adapter_path=str(run.output / "adapters"))
    fused, base_model = (
        load(folder, compute="stored").model for folder in (run.output / "model", base)
    )
    adapted.eval()
    tokens = mx.array([[5, 80, 200, 7, 33, 120]])
    logits = adapted(tokens).astype(mx.float32)
    fused_error = mx.abs(logits - fused(tokens).astype(mx.float32)).max().item()
    base_error = mx.abs(logits - base_model(tokens).astype(mx.float32)).max().item()
    assert fused_error < 0.02 < 0.2 < base_error


@pytest.mark.parametrize("kind", ["lora-qat", "qat"])
def test_reference_quantizes_to_the_served_weights(finished, kind):
    """The dense export quantizes to exactly the exported codes, scales and biases."""
    stage = finished(kind).output / "stages/1-train"
    dense, model = (
        dict(tree_flatten(load(stage / name, compute="stored").model.parameters()))
        for name in ("dense", "model")
    )
    quantized_paths = [
        name.removesuffix(".scales") for name in model if "scales" in name
    ]
    assert len(quantized_paths) == 15
    for path in quantized_paths:
        codes, scales, biases = mx.quantize(dense[f"{path}.weight"], 32, 4)
        assert mx.array_equal(codes, model[f"{path}.weight"]), path
        assert mx.array_equal(scales, model[f"{path}.scales"]), path
        assert mx.array_equal(biases, model[f"{path}.biases"]), path


def test_missed_threshold_publishes_nothing(tmp_path, base, capsys):
    """The base model has no reference, so its KL is not measured."""
    limits = {"max_perplexity": 1.01, "min_exact_match": 0.0, "max_kl": 100.0}
    evaluate = EVALUATE | {"thresholds": limits, "num_samples": 0}
    run = Run(tmp_path, {"evaluate": evaluate}, "export", model=base)
    assert run() == 1
    output, error = capsys.readouterr()
    missed = "misses its thresholds: max_kl, max_perplexity"
    assert f"{missed}; nothing is published" in error
    assert "threshold max_kl: not measured" in output
    results = {r["name"]: r for r in run.json("report.json")["thresholds"]}
    passed = {name: result["passed"] for name, result in results.items()}
    assert passed == {"max_kl": False, "max_perplexity": False, "min_exact_match": True}
    perplexity = results["max_perplexity"]
    assert perplexity["limit"] == 1.01 < perplexity["value"]
    assert not (run.output / "model").exists()
    assert run.json("manifest.json")["status"] == "failed"
    html = page(run)
    assert [row[-1] for row in rows(html)].count("missed") == 2
    assert ["Status", "failed"] in rows(html)
    assert missed in html
    assert "samples" not in sections(html)
    assert "lmx generate" not in html
    assert run() == 1


@pytest.mark.parametrize(
    ("damaged", "rerun"),
    [
        ("stages/2-quantize/model", NAMES[1:]),
        ("model", NAMES[3:]),
    ],
)
def test_damaged_artifact_is_rebuilt(tmp_path, full_run, capsys, damaged, rerun):
    run = full_run.copy(tmp_path)
    weights = run.output / damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    lines = len(run.log.splitlines())
    assert run() == 0
    assert f"{damaged} is damaged or missing" in capsys.readouterr().err
    messages = [line[20:] for line in run.log.splitlines()[lines:]]
    stages = [line for line in messages if line.startswith("stage ")]
    assert [s.removeprefix("stage ") for s in stages if "already" not in s] == rerun
    name = "stages/2-quantize/model"
    assert hash_folder(run.output / name) == hash_folder(full_run.output / name)
    rebuilt = (run.output / "model" / "model.safetensors").read_bytes()
    assert rebuilt == (full_run.output / "model" / "model.safetensors").read_bytes()
    assert run.records() == full_run.records()
    assert run.records("samples.jsonl") == full_run.records("samples.jsonl")


# The nested config of a vision-language model.
MISTRAL3 = {
    "model_type": "mistral3",
    "text_config": {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "vocab_size": 320,
    },
    "eos_token_id": [2, 0],
}


@pytest.mark.parametrize(
    "base",
    [MISTRAL3, pytest.param(QWEN3_MOE, marks=pytest.mark.slow)],
    ids=["nested", "experts"],
)
def test_run_of_other_architectures(tmp_path, make_checkpoint, base):
    """A nested config, and a mixture of experts."""
    adapter = LORA | {"target_modules": ["self_attn.*"]}
    lora = TRAIN | {"steps": 2, "adapter": adapter}
    qat = TRAIN | {"steps": 2, "qat": GRID}
    stages = {"train": lora}, {"train": qat}, {"evaluate": EVALUATE}, "export"
    run = Run(tmp_path, *stages, model=make_checkpoint(base))
    assert run() == 0
    check_report(run.json("report.json"), ["base", "fine-tuned", "quantized"])


def test_fusing_that_loses_what_was_learned_is_reported(
    tmp_path, base, finished, monkeypatch
):
    """With a way out; rounding that does not move the loss is no warning."""
    small = TRAIN | {"adapter": LORA, "learning_rate": 1e-6, "steps": 2}
    for name, train in (("small", small), ("lost", KINDS["lora"])):
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name, {"train": TRAIN | train}, model=base)
        with monkeypatch.context() as patch:
            if name == "lost":
                # As of weights whose steps are larger than all updates.
                patch.setattr(lora_model, "fuse", lambda model, base, *_: dict(base))
            assert run() == 0
        assert ("warning: fusing rounds to float16" in run.log) == (name == "lost")
    assert f": lmx convert {base} {base.name}-float32 --dtype float32, then" in run.log
    assert f"lmx generate {base} --adapter-path {run.output / 'adapters'}" in run.log
    assert "fusing rounds" not in finished("lora").log


def test_progress_of_a_run_never_goes_back(tmp_path, base, monkeypatch):
    """Every amount has a name, and those of a name never fall in a stage."""
    monkeypatch.setattr("lmx.run.logger.HEARTBEAT_SECONDS", 0.02)
    quantize = {"quantize": GRID | {"method": "gptq", "effort": "fast"}}
    stages = {"train": TRAIN | {"adapter": LORA}}, quantize
    run = Run(tmp_path, *stages, {"evaluate": EVALUATE}, "export", model=base)
    assert run() == 0
    shown, stage = defaultdict(list), ""
    for line in run.log.splitlines():
        text = line[20:]
        stage = text if re.fullmatch(r"stage \d-\w+", text) else stage
        for part in text.split("; "):
            if match := re.match(rf"({BARS}.*?) (\d+)(%|/\d+)(  |$)", part):
                shown[stage, match[1]].append(int(match[2]))
    assert len(shown) > 2
    assert {k: sorted(v) for k, v in shown.items()} == shown
