"""A killed, stopped or damaged run ends with the weights of an undisturbed run."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import cache

import mlx.core as mx
import pytest
from lmx.cli import main
from page_data import charts, rows, sections
from test_draft_stage import DRAFT
from test_drafter_stage import make_run as drafter_run
from test_preference_runs import make_run as preference_run
from test_report_of_runs import page
from test_rollout_runs import make_run as rollout_run
from test_teacher_setup import GENERATED, STORED, renumber
from tiny_runs import EVALUATE, METRICS_ONLY, TRAIN, Run, resume_command

LORA = {"type": "lora", "rank": 4}
GRID = {"bits": 4, "group_size": 32}
TWO_BITS = {"bits": 2, "group_size": 32}
LSQ = {"qat": TWO_BITS | {"quantizer": "lsq"}}
SHORT = {"packing": True, "batch_size": 2, "steps": 8}
GPTQ = {
    "method": "gptq",
    "bits": 3,
    "calibration": {
        "dataset": "builtin:stdlib",
        "num_tokens": 2048,
        "max_seq_length": 64,
    },
}
SEARCH = {"mixed_precision": {"target_bpw": 5.0, "candidate_bits": [4, 8]}}
TRAININGS = {
    "full": {},
    "dora+": {"adapter": LORA | {"type": "dora", "loraplus_lr_ratio": 4.0}},
    "lora-qat": {"adapter": LORA, "qat": GRID},
    "grids": {"adapter": LORA, "qat": GRID | {"quantizer": "lsq"}},
    "late-grids": {"qat": GRID | {"quantizer": "lsq", "fake_quant_after_n_steps": 6}},
    "baseline": {"qat": TWO_BITS, "compare_full_precision": True},
    # The learning rate is too high: the run stops early and keeps an older checkpoint.
    "lean": {
        "steps": None,
        "epochs": 47.8,
        "gradient_accumulation_steps": 3,
        "adapter": LORA | {"type": "dora", "dropout": 0.2},
        "optimizer": "muon",
        "learning_rate": 0.03,
        "lr_schedule": "constant",
        "load_best_at_end": True,
        "save_total_limit": 1,
        "early_stopping_patience": 1,
        "gradient_checkpointing": True,
        "loss_chunk_tokens": 16,
    },
}
# Of the codes of a quantized model.
FROM_CODES = {
    "codes": {"qat": TWO_BITS, "adapter": {"rank": 4}},
    "mxfp4 codes": {"qat": {"mode": "mxfp4"}},
    "teacher": LSQ | SHORT | {"teacher": {}},
    "stored completions": LSQ | SHORT | {"teacher": GENERATED},
}
STAGES = {
    **{kind: [{"train": TRAIN | keys}] for kind, keys in TRAININGS.items()},
    **{
        kind: [
            {"quantize": {"mode": "mxfp4"} if "mxfp4" in kind else TWO_BITS},
            {"train": TRAIN | keys},
        ]
        for kind, keys in FROM_CODES.items()
    },
    "gptq": [{"quantize": GPTQ}],
    "search": [{"quantize": GPTQ | SEARCH}],
    "draft": [{"draft": DRAFT}],
}
MAKERS = {
    "preference": lambda folder, base: preference_run(folder, "kto-full", base),
    "preference-qat": lambda folder, base: preference_run(folder, "orpo-qat", base),
    "rewards": lambda folder, base: rollout_run(folder, "grpo-lora", base, steps=8),
    "rewards-qat": lambda folder, base: rollout_run(folder, "dapo-qat", base, steps=8),
    "rewards-twice": lambda folder, base: rollout_run(
        folder, "gspo-full", base, steps=8
    ),
    "eagle3": lambda folder, base: drafter_run(folder, "eagle3", base),
}


def make_run(folder, kind, base):
    folder.mkdir(exist_ok=True)
    if kind in MAKERS:
        return MAKERS[kind](folder, base)
    if kind == "other tokenizer":
        teacher = STORED | {"model": str(renumber(base, folder / "teacher"))}
        train = TRAIN | LSQ | SHORT | {"teacher": teacher}
        return Run(folder, {"train": train}, model=base)
    run = Run(folder, *STAGES[kind], model="" if kind == "full" else base)
    if kind == "draft":
        run.data["max_seq_length"] = 128
        run.write()
    return run


@pytest.fixture(scope="session")
def finished(tmp_path_factory, base):
    """A function from a kind of run to its undisturbed run."""

    @cache
    def run_of_kind(kind):
        run = make_run(tmp_path_factory.mktemp("undisturbed"), kind, base)
        assert run() == 0
        return run

    return run_of_kind


def stage_files(run):
    """The names in the stage folders: no scratch folder of a killed stage is left."""
    return {(p.parent.name, p.name) for p in run.output.glob("stages/*/*")}


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


# dpo with LoRA: tests/fuzz/test_fuzz_kills.py, which kills stages at any moment.
@pytest.mark.parametrize(
    ("kind", "where", "call"),
    [
        ("full", "save", 4),
        ("late-grids", "step", 7),
        ("codes", "step", 8),
        ("teacher", "step", 7),
        ("other tokenizer", "step", 7),
        ("preference", "step", 7),
        ("rewards", "reward", 75),
        slow("dora+", "step", 5),
        slow("lora-qat", "save", 3),
        slow("grids", "step", 8),
        slow("late-grids", "step", 10),
        # Steps 13 to 24 belong to the baseline.
        slow("baseline", "step", 21),
        slow("lean", "step", 13),
        slow("mxfp4 codes", "step", 8),
        slow("stored completions", "step", 7),
        slow("preference-qat", "step", 7),
        slow("rewards-qat", "step", 7),
        slow("rewards-twice", "reward", 90),
        # In the first block and in the last one. The first file of a search has
        # gradients.
        slow("gptq", "save", 8),
        slow("gptq", "save", 15),
        slow("search", "save", 1),
        slow("draft", "step", 7),
        slow("eagle3", "step", 7),
    ],
)
def test_run_resumes_after_kill(tmp_path, base, finished, kind, where, call):
    run, expected = make_run(tmp_path, kind, base), finished(kind)
    assert run.run_with_signal("SIGKILL", where, call).returncode == -signal.SIGKILL
    if where == "save" and kind in TRAININGS:
        assert run.partial_files()
    assert run() == 0
    assert re.search("crashed or was killed in stage .-(train|quantize|draft)", run.log)
    assert where == "save" or "resuming after step" in run.log
    assert "packing is off" not in run.log
    if kind == "other tokenizer":
        assert "its predictions are mapped; it has 100.0% of the" in run.log
        assert "the teacher predicts 100.0% of" in run.log
    weights, records = run.outcome()
    assert weights == expected.outcome()[0] != {}
    # Drafts have predictions from measured times.
    if kind not in ("draft", "eagle3"):
        assert records == expected.outcome()[1]
    if kind.startswith("rewards"):
        assert run.records("samples.jsonl") == expected.records("samples.jsonl")
    # No block is quantized twice.
    blocks = re.findall(r"block \d+ of \d+ quantized", run.log)
    assert len(blocks) == len(set(blocks))
    assert stage_files(run) == stage_files(expected)
    assert not run.partial_files()


def test_run_resumes_after_signal(tmp_path, base, finished):
    """The signal of Ctrl-C; see below for SIGTERM."""
    run = make_run(tmp_path, "full", base)
    process = run.run_with_signal("SIGINT", "step", 7)
    assert process.returncode == 130
    assert "stopped after step 7; saved" in process.stderr
    assert run.json("manifest.json")["status"] == "interrupted"
    html = page(run)
    assert ["Status", "interrupted; the same command resumes it"] in rows(html)
    assert "to resume: lmx-train" in html
    assert charts(html)[0]["lines"][0][0] == "training"
    shown = [
        "final_log_lines",
        "curves_of_1-train",
        "commands",
        "recipe",
        "versions_and_hashes",
    ]
    assert [*sections(html)] == shown
    assert main.train(resume_command(process.stderr)) == 0
    assert "resuming after step 7" in run.log
    assert run.outcome() == finished("full").outcome()


def test_run_resumes_after_signal_in_evaluate(tmp_path, base, monkeypatch, capsys):
    run = Run(tmp_path, {"quantize": GRID}, {"evaluate": EVALUATE}, model=base)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lmx.pipeline.evaluate.metrics.measure_perplexity", stop)
        assert run("--ignore-limits") == 130
    assert run.json("manifest.json")["status"] == "interrupted"
    arguments = resume_command(capsys.readouterr().err)
    assert arguments == run.arguments("--ignore-limits")
    assert main.train(arguments) == 0
    assert "stage 1-quantize: already complete, skipping" in run.log


@pytest.mark.parametrize(
    "place",
    [
        "lmx.run.run_dir.RunDir.write_page",
        "lmx.pipeline.quantize.stage.QuantizeStage.run",
        "lmx.pipeline.runner._next_commands",
    ],
)
def test_sigterm_is_an_interruption(tmp_path, base, monkeypatch, place):
    """In a stage, while the run directory opens, and after the last stage. By default,
    SIGTERM ends the process, and the run seems to go on."""
    run = Run(tmp_path, {"quantize": GRID}, "export", model=base)

    def stop(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    with monkeypatch.context() as patch:
        # At the end of the run, too, the record of the interruption writes the page.
        once = place.endswith("write_page")
        patch.setattr(place, only_once(stop) if once else stop)
        assert run("--ignore-limits") == 130
    assert run.json("manifest.json")["status"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert run("--ignore-limits") == 0


def only_once(function):
    """Call a function the first time only."""
    calls = iter([function])
    return lambda *arguments: next(calls, lambda *_: None)(*arguments)


def test_closed_pipe_does_not_end_a_run(tmp_path, base):
    """As in `lmx-train RECIPE | head -1`."""
    run = make_run(tmp_path, "full", base)
    reader, writer = os.pipe()
    os.close(reader)
    program = "import sys; from lmx.cli import main; sys.exit(main.train(sys.argv[1:]))"
    command = [sys.executable, "-c", program, *run.arguments()]
    process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (process.returncode, process.stderr) == (0, "")
    assert run.json("manifest.json")["status"] == "done"
    assert f"done: {run.output / 'report.html'}" in run.log


@pytest.mark.parametrize("damage", ["flipped", "cut", "both lost"])
def test_damaged_checkpoints_are_skipped(tmp_path, base, finished, capsys, damage):
    run = finished("full").copy(tmp_path)
    checkpoints = sorted((run.output / "stages/1-train/checkpoints/steps").iterdir())
    assert [p.name for p in checkpoints] == ["0000010", "0000012"]
    weights = checkpoints[1] / "content/state.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 16
    if damage == "both lost":
        for checkpoint in checkpoints:
            (checkpoint / "content/index.json").unlink()
    else:
        weights.write_bytes(data if damage == "flipped" else data[:-100])
    (run.output / "stages/1-train/dense/model.safetensors").unlink()
    capsys.readouterr()
    assert run() == 0
    warnings = capsys.readouterr().err
    assert "dense is damaged or missing: stage 1-train runs again" in warnings
    if damage != "both lost":
        assert f"checkpoint {checkpoints[1]} is damaged" in warnings
        assert "resuming after step 10" in run.log
    assert run.outcome() == finished("full").outcome()


def test_other_seed_gives_other_weights(tmp_path, base, finished):
    """Negative control for the equal hashes in this file."""
    run = make_run(tmp_path, "full", base)
    assert run("seed=1") == 0
    assert run.outcome()[0] != finished("full").outcome()[0]


LORA_QAT = {"train": TRAIN | TRAININGS["lora-qat"]}
TEACHER = {"train": TRAIN | {"teacher": {"model": "changed"}}}
OWN_TEACHER = {"train": TRAIN | {"adapter": LORA, "teacher": {}}}
PRUNED = {
    "draft_model": {"init_from": "changed", "num_layers": 1},
    "data_generation": {"num_prompts": 8, "num_eval_prompts": 2, "max_tokens": 8},
    "steps": 8,
    "batch_tokens": 128,
    "save_steps": 2,
}


@pytest.mark.parametrize(
    ("model", "stages", "place", "call"),
    [
        ("changed", [LORA_QAT], "step", 4),
        ("changed", [{"quantize": GRID | {"method": "gptq"}}], "save", 2),
        ("changed", [{"quantize": GRID}, OWN_TEACHER], "step", 4),
        ("base", [TEACHER], "step", 4),
        ("base", [{"draft": PRUNED}], "step", 4),
    ],
    ids=["model", "gptq", "reference", "teacher", "init_from"],
)
def test_another_model_is_not_mixed_into_an_interrupted_run(
    model, stages, place, call, tmp_path, base, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, "base")
    shutil.copytree(base, "changed")
    run = Run(tmp_path, *stages, model=model)
    assert run.run_with_signal("SIGKILL", place, call).returncode == -9
    file = "changed/model.safetensors"
    weights = {name: 1.1 * value for name, value in mx.load(file).items()}
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "mlx"})
    assert run() == 2
    error = capsys.readouterr().err
    assert re.search(r"out: changed since this run started: .*\(changed\)\n", error)
    if stages == [LORA_QAT]:
        assert run("--restart") == 0


def test_train_stages_keep_their_own_adapters(tmp_path, base):
    train = {"train": TRAIN | {"adapter": LORA, "steps": 2}}
    run = Run(tmp_path, train, train, model=base)
    assert run() == 0
    first, second = (
        run.output / "stages" / f"{number}-train/adapters/adapters.safetensors"
        for number in (1, 2)
    )
    published = run.output / "adapters/adapters.safetensors"
    assert published.read_bytes() == second.read_bytes() != first.read_bytes()
    assert run() == 0
    assert "runs again" not in run.log
    assert run.log.count("already complete, skipping") == 2


def test_evaluation_after_an_export_has_the_same_baseline(tmp_path, base):
    train = {"train": TRAIN | {"adapter": LORA, "steps": 4}}
    run = Run(tmp_path, train, "export", {"evaluate": METRICS_ONLY}, model=base)
    assert run() == 0
    models = run.json("report.json")["models"]
    assert list(models) == ["base", "fine-tuned"]
    assert models["fine-tuned"]["kl_mean"] > 1e-4
