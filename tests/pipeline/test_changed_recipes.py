"""A changed recipe keeps the finished stages before the first change."""

import pytest
from lmx import __version__
from lmx.files.hashes import hash_folder
from lmx.pipeline import resources
from tiny_runs import METRICS_ONLY, TRAIN, Run

SHORT = TRAIN | {"steps": 5}
GRID = {"bits": 4, "group_size": 32}
NAMES = ["1-train", "2-quantize", "3-evaluate", "4-export"]


@pytest.fixture
def run(full_run, tmp_path):
    """A copy of a finished run of four stages."""
    return full_run.copy(tmp_path / "copy")


def stages_of_last_run(run):
    """The stages that the last run ran, and its line about the change."""
    last = run.log[run.log.rindex(f"lmx {__version__}: ") :].splitlines()
    lines = [line[20:] for line in last]
    ran = [line.removeprefix("stage ") for line in lines if line.startswith("stage ")]
    notes = [line for line in lines if line.startswith("the recipe has changed")]
    return [name for name in ran if "already complete" not in name], notes


def weights(run, folder="model"):
    return (run.output / folder / "model.safetensors").read_bytes()


def test_added_export_format_keeps_all_other_stages(run):
    before = weights(run)
    (run.output / "model/leftover").write_text("of the earlier export")
    assert run("stages.4.export.formats=[mlx, hf]") == 0
    ran, notes = stages_of_last_run(run)
    assert ran == NAMES[3:]
    assert notes == [
        'the recipe has changed (stages.4.export.formats: ["mlx"] -> ["mlx", "hf"]): '
        "kept: 1-train, 2-quantize, 3-evaluate; to run: 4-export; "
        "of the earlier recipe until a stage replaces it: model"
    ]
    assert weights(run) == before
    assert (run.output / "hf/config.json").exists()
    assert not (run.output / "model/leftover").exists()
    # The same recipe again has no change, and runs nothing.
    assert run("stages.4.export.formats=[mlx, hf]") == 0
    assert stages_of_last_run(run) == ([], [])


def test_changed_stage_and_later_ones_give_the_model_of_a_new_run(run, tmp_path):
    trained = weights(run, "stages/1-train/dense")
    assert run("stages.2.quantize.bits=8") == 0
    ran, [note] = stages_of_last_run(run)
    assert ran == NAMES[1:]
    assert "(stages.2.quantize.bits: 4 -> 8): kept: 1-train; to run: 2-" in note
    (tmp_path / "new").mkdir()
    new = Run(tmp_path / "new", *run.stages)
    new.data = run.data
    new.write()
    assert new("stages.2.quantize.bits=8") == 0
    assert weights(new, "stages/1-train/dense") == trained
    assert run.outcome() == new.outcome()
    assert weights(run) == weights(new) != trained
    assert run.records("samples.jsonl") == new.records("samples.jsonl")


def test_added_stage_runs_alone(run):
    run.stages.append({"export": {"formats": ["hf"]}})
    run.write()
    assert run() == 0
    ran, [note] = stages_of_last_run(run)
    assert ran == ["5-export"]
    assert "stages.5.export.formats: (added)" in note
    assert "kept: 1-train, 2-quantize, 3-evaluate, 4-export; to run: 5-export" in note


def test_results_of_removed_stages_are_not_those_of_the_run(run):
    report = run.output / "report.json"
    assert report.exists()
    run.stages[2:] = []
    run.write()
    assert run() == 0
    ran, [note] = stages_of_last_run(run)
    assert ran == []
    assert "to run: nothing" in note
    assert "of the earlier recipe until a stage replaces it: model" in note
    assert not report.exists()
    # It is not deleted, but the page names no command that uses it.
    assert (run.output / "model").exists()
    assert "mlx_lm.server" not in (run.output / "report.html").read_text()
    assert list(run.json("manifest.json")["stages"]) == NAMES[:2]
    assert [p.name for p in sorted((run.output / "stages").iterdir())] == NAMES[:2]


def test_other_model_data_or_seed_is_refused_with_the_difference(run, capsys):
    before = hash_folder(run.output)
    for change in ("seed=7", "data.max_seq_length=32"):
        capsys.readouterr()
        assert run(change, "stages.2.quantize.bits=8") == 2
        error = capsys.readouterr().err
        key, _, value = change.partition("=")
        assert f"{key}: " in error
        assert f"-> {value}" in error
    assert "stages.2.quantize.bits: 4 -> 8" in error
    assert "the run of another recipe" in error
    # Only the differences.
    assert "tiny.yaml" not in error.split("hint")[0].split("\n", 1)[1]
    assert hash_folder(run.output) == before
    assert run() == 0
    assert stages_of_last_run(run) == ([], [])


def test_report_of_the_last_finished_stage_is_restored(run):
    """Damage to report.json is no reason to measure again."""
    report = run.output / "report.json"
    before = report.read_bytes()
    for damage in (lambda: report.write_text("[]"), report.unlink):
        damage()
        assert run() == 0
        assert report.read_bytes() == before
    assert stages_of_last_run(run) == ([], [])
    (run.output / "stages/3-evaluate/report.json").write_text("[]")
    assert run() == 0
    assert stages_of_last_run(run)[0] == NAMES[2:]
    assert run.json("report.json")["models"]


def interrupted(tmp_path, base, *stages):
    """A run that was interrupted in the training, after a checkpoint."""
    tmp_path.mkdir(exist_ok=True)
    run = Run(tmp_path, {"train": SHORT}, *stages, model=base)
    assert run.run_with_signal("SIGINT", "step", 3).returncode == 130
    return run


def test_change_behind_an_unfinished_training_continues_it(tmp_path, base):
    run = interrupted(tmp_path / "changed", base)
    run.stages.append({"evaluate": METRICS_ONLY})
    run.write()
    assert run() == 0
    _, [note] = stages_of_last_run(run)
    assert note.endswith(": continues 1-train at step 3; to run: 2-evaluate")
    assert "resuming after step 3" in run.log


def test_changed_unfinished_training_starts_anew(tmp_path, base):
    run = interrupted(tmp_path / "changed", base)
    change = "stages.1.train.learning_rate=1e-3"
    assert run(change) == 0
    ran, [note] = stages_of_last_run(run)
    assert ran == ["1-train"]
    assert "kept: nothing; to run: 1-train" in note
    assert "its checkpoints are now in stages/1-train.old-1" in note
    aside = run.output / "stages/1-train.old-1/checkpoints/steps"
    assert sorted(p.name for p in aside.iterdir()) == ["0000002", "0000003"]
    assert "resuming" not in run.log
    (tmp_path / "new").mkdir()
    new = Run(tmp_path / "new", {"train": SHORT}, model=base)
    assert new(change) == 0
    trained = "stages/1-train/dense"
    assert weights(run, trained) == weights(new, trained)
    assert run.records() == new.records()


def test_changed_later_stage_does_not_disturb_the_resumed_training(tmp_path, base):
    run = interrupted(tmp_path, base, {"quantize": GRID})
    assert run("stages.2.quantize.bits=8") == 0
    ran, [note] = stages_of_last_run(run)
    assert ran == ["1-train", "2-quantize"]
    assert "old-1" not in note
    assert "resuming after step 3" in run.log


def test_failed_run_does_not_block_its_folder(tmp_path, capsys):
    run = Run(tmp_path, {"train": SHORT | {"learning_rate": 4e9, "warmup_ratio": 0}})
    assert run() == 1
    run.stages[0] = {"train": SHORT}
    run.write()
    assert run("seed=1") == 0
    assert "the recipe has changed" in capsys.readouterr().out


def test_loosened_threshold_measures_again_and_publishes(tmp_path, base):
    evaluate = METRICS_ONLY | {"thresholds": {"max_perplexity": 1.01}}
    run = Run(
        tmp_path, {"quantize": GRID}, {"evaluate": evaluate}, "export", model=base
    )
    assert run() == 1
    assert run("stages.2.evaluate.thresholds.max_perplexity=1e9") == 0
    ran, [note] = stages_of_last_run(run)
    assert ran == ["2-evaluate", "3-export"]
    assert "max_perplexity: 1.01 -> 1000000000.0" in note


CALIBRATION = {"dataset": "builtin:stdlib", "num_tokens": 256, "max_seq_length": 64}
CALIBRATION |= {"num_eval_tokens": 128}
FAST_GPTQ = GRID | {"method": "gptq", "effort": "fast", "calibration": CALIBRATION}


OTHER_VALID = "data.valid=[train.jsonl]"


@pytest.mark.parametrize(
    ("quantize", "refused", "changes"),
    [
        (GRID, None, ["data.valid=[]", "data.train=[valid.jsonl]"]),
        # Without validation data, some training data is held out for it.
        (FAST_GPTQ, "data.valid=[]", [OTHER_VALID]),
        (FAST_GPTQ | {"rollback_if_worse": True}, OTHER_VALID, []),
    ],
)
def test_changed_data_keeps_a_stage_that_does_not_read_it(
    tmp_path, base, quantize, refused, changes, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path, {"quantize": quantize}, "export", model=base)
    assert run() == 0
    before = weights(run, "stages/1-quantize/model")
    if refused:
        assert run(refused) == 2
        assert "whose first stage has other values" in capsys.readouterr().err
    for change in changes:
        assert run(change) == 0
        assert stages_of_last_run(run)[0] == ["2-export"]
        assert weights(run, "stages/1-quantize/model") == before


def test_finished_stages_need_no_memory_and_disk(run, capsys, monkeypatch):
    def estimated(*flags):
        """The line about the disk, and those about memory."""
        capsys.readouterr()
        assert run("--dry-run", *flags) == 0
        lines = capsys.readouterr().out.splitlines()
        finished = [line for line in lines if line.endswith(", already complete")]
        assert len(finished) == (0 if flags == ("--restart",) else 4 - len(flags) * 2)
        disk = next(line for line in lines if line.startswith("disk     needs"))
        return disk.split()[2:4], [line for line in lines if line.startswith("memory")]

    disk, memory = estimated("--restart")
    assert disk != ["0", "B,"]
    assert len(memory) == 3
    assert estimated() == (["0", "B,"], [])
    _, [evaluation] = estimated("stages.3.evaluate.num_tokens=400")
    assert "3-evaluate" in evaluation
    # What is done is no reason to refuse.
    monkeypatch.setattr(resources, "memory_limit", lambda: 1)
    assert run() == 0
    assert run("--dry-run", "--restart") == 3
    assert run("--restart") == 3
