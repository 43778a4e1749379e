"""Every stage through the command line: what is reported, what is left, what loads."""

import json
import math
import shutil

import mlx.core as mx
import pytest
from lmx.generation.engine import Generator
from lmx.models.loader import load
from lmx.run.fs import hash_folder
from mlx.utils import tree_flatten
from tiny_checkpoints import QWEN3_MOE
from tiny_runs import TRAIN, VALIDATE, Run

LORA = {"type": "lora", "rank": 8}
GRID = {"bits": 4, "group_size": 32}
ALWAYS = {"perplexity", "perplexity_stderr", "bits_per_weight", "bytes", "exact_match"}
COMPARED = {"kl_mean", "kl_p99", "top1_agreement"}
GUESSED = {
    "acceptance_rate",
    "acceptance_rate_by_position",
    "accepted_length",
    "speedup",
}
SPEEDS = {"ttft_ms", "prefill_tokens_per_second", "decode_tokens_per_second"}


@pytest.fixture(scope="session")
def finished(tmp_path_factory, base):
    """Finished runs of train, validate and export, by what the train stage adds."""
    runs = {}

    def of(kind):
        if kind not in runs:
            train = TRAIN | {"lr_schedule": "constant"} | KINDS[kind]
            stages = {"train": train}, {"evaluate": VALIDATE}, "export"
            runs[kind] = Run(tmp_path_factory.mktemp(kind), *stages, model=base)
            assert runs[kind]() == 0
        return runs[kind]

    return of


KINDS = {
    "lora": {"adapter": LORA | {"dropout": 0.1}, "learning_rate": 1e-2},
    "lora-qat": {"adapter": LORA, "qat": GRID, "learning_rate": 1e-2},
    "qat": {"qat": GRID},
}
NAMES = {
    "lora": ["base", "fine-tuned"],
    "lora-qat": ["base", "fine-tuned", "quantized"],
    "qat": ["base", "fine-tuned", "quantized"],
}


def check_report(report, names):
    assert list(report["models"]) == names
    for name, figures in report["models"].items():
        assert figures.keys() >= ALWAYS
        assert (figures.keys() >= COMPARED) == (name != names[0])
        assert figures["generation"].keys() == SPEEDS
        for tail in figures["generation"].values():
            assert tail.keys() == {"p50", "p90", "p99"}
        assert figures["speculation"].keys() == {"prompt_lookup"}
        guessing = figures["speculation"]["prompt_lookup"]
        assert guessing.keys() == GUESSED
        assert guessing["speedup"] > 0
        numbers = [v for v in figures.values() if isinstance(v, float)]
        assert all(map(math.isfinite, numbers))


def test_run_from_scratch_to_export(whole):
    report = whole.json("report.json")
    check_report(report, ["fine-tuned", "quantized"])
    tuned, quantized = report["models"].values()
    assert tuned["bits_per_weight"] == 16
    # Codes of 4 bits, and for 32 of them a scale and a bias of 16; norms apart.
    assert quantized["bits_per_weight"] == pytest.approx(5, abs=0.1)
    [*_, last] = [row for row in whole.rows() if row["kind"] == "valid"]
    assert tuned["loss"] == pytest.approx(last["loss"], rel=1e-3)
    assert [gate["name"] for gate in report["thresholds"]] == [
        "max_kl",
        "min_top1_agreement",
    ]
    for gate in report["thresholds"]:
        assert gate.keys() == {"name", "value", "limit", "passed"}
        assert gate["passed"]
    assert report["thresholds"][0]["value"] == quantized["kl_mean"]
    manifest = whole.json("manifest.json")
    assert manifest["status"] == "done"
    assert list(manifest["stages"]) == [
        "1-train",
        "2-quantize",
        "3-evaluate",
        "4-export",
    ]
    measured = hash_folder(whole.output / "stages/2-quantize/model")
    assert measured.items() <= hash_folder(whole.output / "model").items()
    assert [row["step"] for row in whole.rows("samples.jsonl")] == [0, 15, 30, 45]


@pytest.mark.parametrize("kind", KINDS)
def test_run_from_a_base_model(finished, kind):
    run = finished(kind)
    report = run.json("report.json")
    check_report(report, NAMES[kind])
    # The gain is that of the served model, and training had promised it.
    gain = report["training"]["improvement"]
    base, *_, served = report["models"].values()
    assert gain["exported"] == pytest.approx(base["loss"] - served["loss"], abs=1e-4)
    assert gain["exported"] == pytest.approx(gain["in_training"], abs=1e-3)
    assert gain["exported"] > 0.02
    assert (run.output / "adapters").is_dir() == ("adapter" in KINDS[kind])


def greedy(folder, prompts, count):
    """The answers of stock mlx-lm, in float32: in 16 bits, near ties are luck."""
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(folder))
    model.set_dtype(mx.float32)
    return [
        mlx_lm.generate(model, tokenizer, prompt, max_tokens=count)
        for prompt in prompts
    ]


@pytest.mark.parametrize("kind", ["whole", *KINDS])
def test_mlx_lm_logits_match(whole, finished, kind):
    run = whole if kind == "whole" else finished(kind)
    folder = run.output / "model"
    loaded = load(folder, compute="float32")
    generator = Generator(loaded.model, loaded.tokenizer)
    prompts = [generator.encode_chat(f"Add {n} and 1.") for n in (1, 22, 333)]
    found = [generator.generate(p, max_tokens=12).text for p in prompts]
    assert found == greedy(folder, prompts, 12)
    assert all(len(text) > 10 for text in found)


def test_mlx_lm_loads_the_adapter(finished, base):
    """Base plus adapter, and the fused export, are one model."""
    import mlx_lm

    run = finished("lora")
    adapted, _ = mlx_lm.load(str(base), adapter_path=str(run.output / "adapters"))
    fused, plain = (
        load(folder, compute="stored").model for folder in (run.output / "model", base)
    )
    adapted.eval()
    tokens = mx.array([[5, 80, 200, 7, 33, 120]])
    logits = adapted(tokens).astype(mx.float32)
    near = mx.abs(logits - fused(tokens).astype(mx.float32)).max().item()
    far = mx.abs(logits - plain(tokens).astype(mx.float32)).max().item()
    assert near < 0.02 < 0.2 < far


@pytest.mark.parametrize("kind", ["lora-qat", "qat"])
def test_reference_quantizes_to_the_served_weights(finished, kind):
    """Codes are exported as trained; the twin is what they were rounded from."""
    stage = finished(kind).output / "stages/1-train"
    dense, model = (
        dict(tree_flatten(load(stage / name, compute="stored").model.parameters()))
        for name in ("dense", "model")
    )
    rounded = [name.removesuffix(".scales") for name in model if "scales" in name]
    assert len(rounded) == 15
    for path in rounded:
        codes, scales, biases = mx.quantize(dense[f"{path}.weight"], 32, 4)
        assert mx.array_equal(codes, model[f"{path}.weight"]), path
        assert mx.array_equal(scales, model[f"{path}.scales"]), path
        assert mx.array_equal(biases, model[f"{path}.biases"]), path


def test_missed_threshold_publishes_nothing(tmp_path, base, capsys):
    validate = VALIDATE | {
        "thresholds": {"max_perplexity": 1.01, "min_exact_match": 0.0}
    }
    run = Run(tmp_path, {"evaluate": validate}, "export", model=base)
    assert run() == 1
    assert "misses its thresholds: max_perplexity; nothing is published" in (
        capsys.readouterr().err
    )
    gates = {gate["name"]: gate for gate in run.json("report.json")["thresholds"]}
    assert not gates["max_perplexity"]["passed"]
    assert gates["max_perplexity"]["limit"] == 1.01 < gates["max_perplexity"]["value"]
    assert gates["min_exact_match"]["passed"]
    assert not (run.output / "model").exists()
    assert run.json("manifest.json")["status"] == "failed"
    assert run() == 1


def test_unmeasured_threshold_is_missed(tmp_path, base, capsys):
    """Nothing to compare the base with: an unproven claim is no proof."""
    validate = VALIDATE | {"thresholds": {"max_kl": 100.0}}
    run = Run(tmp_path, {"evaluate": validate}, "export", model=base)
    assert run() == 1
    assert "threshold max_kl: not measured" in capsys.readouterr().out
    assert not (run.output / "model").exists()


def copied(whole, tmp_path):
    """A finished run to do harm to."""
    run = Run(tmp_path, *whole.stages)
    run.data = whole.data
    run.write()
    shutil.copytree(whole.output, run.output)
    return run


def test_complete_stages_are_skipped(tmp_path, whole):
    run = copied(whole, tmp_path)
    before = hash_folder(run.output / "model")
    lines = len(run.log.splitlines())
    assert run() == 0
    said = [line[20:] for line in run.log.splitlines()[lines:]]
    assert said[1:-1] == [
        f"stage {name}: already complete, skipping"
        for name in ("1-train", "2-quantize", "3-evaluate", "4-export")
    ]
    assert hash_folder(run.output / "model") == before
    assert run.rows() == whole.rows()


@pytest.mark.parametrize(
    ("damaged", "again"),
    [
        ("stages/1-train/dense", ["1-train", "2-quantize", "3-evaluate", "4-export"]),
        ("stages/2-quantize/model", ["2-quantize", "3-evaluate", "4-export"]),
        ("model", ["4-export"]),
    ],
)
def test_damaged_artifact_is_rebuilt(tmp_path, whole, capsys, damaged, again):
    run = copied(whole, tmp_path)
    weights = run.output / damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    lines = len(run.log.splitlines())
    assert run() == 0
    assert f"{damaged} is damaged or missing" in capsys.readouterr().err
    said = [line[20:] for line in run.log.splitlines()[lines:]]
    stages = [line for line in said if line.startswith("stage ")]
    assert [s.removeprefix("stage ") for s in stages if "already" not in s] == again
    for name in ("stages/1-train/dense", "stages/2-quantize/model"):
        assert hash_folder(run.output / name) == hash_folder(whole.output / name)
    mended = (run.output / "model" / "model.safetensors").read_bytes()
    assert mended == (whole.output / "model" / "model.safetensors").read_bytes()
    assert run.rows() == whole.rows()
    assert run.rows("samples.jsonl") == whole.rows("samples.jsonl")


def test_changed_recipe_is_refused(tmp_path, whole, capsys):
    run = copied(whole, tmp_path)
    assert run("seed=7", "stages.1.train.steps=5") == 2
    said = capsys.readouterr().err
    assert "the run of another recipe" in said
    assert "seed: 0 -> 7" in said
    assert "steps: 45 -> 5" in said
    assert "tiny.yaml" not in said.split("hint")[0].split("\n", 1)[1]
    assert run() == 0


def test_restart_renames_the_old_run(tmp_path, base):
    run = Run(tmp_path, {"quantize": GRID}, model=base)
    assert run() == 0
    old = run.json("manifest.json")
    assert run("seed=7", "--restart") == 0
    aside = tmp_path / "out.old-1"
    assert json.loads((aside / "manifest.json").read_text()) == old
    assert run.json("manifest.json")["recipe_hash"] != old["recipe_hash"]


def test_one_process_at_a_time(tmp_path, whole, capsys):
    import fcntl

    run = copied(whole, tmp_path)
    with open(run.output / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run() == 2
        assert "another process uses this folder" in capsys.readouterr().err
        assert run("--restart") == 2
    assert run() == 0


# What the config of a model with eyes looks like.
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
        "vocab_size": 320,
    },
    "eos_token_id": [2, 0],
}


@pytest.mark.parametrize("base", [MISTRAL3, QWEN3_MOE], ids=["nested", "experts"])
def test_other_architectures(tmp_path, make_checkpoint, base):
    """A config within a config; a mixture of experts."""
    adapter = LORA | {"target_modules": ["self_attn.*"]}
    lora = TRAIN | {"steps": 2, "adapter": adapter}
    qat = TRAIN | {"steps": 2, "qat": GRID}
    stages = {"train": lora}, {"train": qat}, {"evaluate": VALIDATE}, "export"
    run = Run(tmp_path, *stages, model=make_checkpoint(base))
    assert run() == 0
    check_report(run.json("report.json"), ["base", "fine-tuned", "quantized"])
