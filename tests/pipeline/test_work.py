"""The time of work, at rates that are measured once per machine."""

import re

import mlx.core as mx
import pytest
from lmx.cli import main
from lmx.pipeline import resources, work
from lmx.pipeline.dry_run import DryRun
from lmx.pipeline.plan import load, plan
from lmx.pipeline.train import fp_baseline
from lmx.pipeline.train import run as train_run
from lmx.pipeline.work import Work, correct_rates, rates, rates_age
from lmx.training.step import TrainStep
from tiny_runs import TRAIN, Run

SOME = Work(1.0, 2.0, 4.0, 8.0, 16.0)


@pytest.fixture
def measured(monkeypatch, tmp_path) -> list[mx.Dtype]:
    """The dtypes whose rates were measured, with a cache of its own."""
    dtypes = []
    monkeypatch.setenv("LMX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(work, "_measure", lambda dtype: dtypes.append(dtype) or SOME)
    return dtypes


def test_rates_are_measured_once_per_machine_and_dtype(measured, tmp_path, monkeypatch):
    for dtype in (mx.float32, mx.float32, mx.bfloat16, mx.float32):
        assert rates(dtype) == SOME
    assert measured == [mx.float32, mx.bfloat16]
    assert rates(mx.float32, again=True) == SOME
    assert 0 <= rates_age(mx.float32) < 60
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "another"})
    rates(mx.float32)
    *_, file = sorted(
        (tmp_path / "cache" / work.RATES).rglob("index.json"),
        key=lambda path: path.stat().st_mtime_ns,
    )
    for damage in ("{", "[]", file.read_text().replace("solved", "other")):
        file.write_text(damage)
        assert rates(mx.float32) == SOME
    assert len(measured) == 7


def test_best_of_several_measurements_is_kept(measured, monkeypatch):
    """Other programs only make a measurement slower."""
    assert rates_age(mx.float32) is None
    rates(mx.float32)
    for speeds in (Work(9.0, 1.0, 4.0, 1.0, 1.0), Work(1.0, 1.0, 8.0, 1.0, 1.0)):
        monkeypatch.setattr(work, "_measure", lambda dtype, speeds=speeds: speeds)
        rates(mx.float32, again=True)
    assert rates(mx.float32) == Work(9.0, 2.0, 8.0, 8.0, 16.0)


def test_training_that_was_faster_corrects_a_rate_measured_under_load(
    measured, monkeypatch
):
    done = Work(trained=100.0)
    # A run does not wait for a measurement.
    assert correct_rates(mx.float32, done, 1.0) is None
    assert not measured
    rates(mx.float32)
    assert correct_rates(mx.float32, done, 90.0) is None
    assert rates(mx.float32) == SOME
    idle = Work(3.0, 70.0, 140.0, 280.0, 560.0)
    monkeypatch.setattr(work, "_measure", lambda dtype: idle)
    assert correct_rates(mx.float32, done, 20.0) == 5
    assert rates(mx.float32) == Work(5.0, 70.0, 140.0, 280.0, 560.0)
    assert correct_rates(mx.float32, done, 20.0) is None


def test_finished_training_corrects_the_dry_run(
    measured, make_checkpoint, tmp_path, capsys, monkeypatch
):
    """One measurement under load no longer makes every later dry run too long."""
    rates(mx.float32)
    run = Run(tmp_path, {"train": TRAIN}, model=make_checkpoint())
    assert run("--dry-run") == 0
    first = capsys.readouterr().out
    assert "at the speed measured just now; `lmx doctor` measures it again" in first
    assert re.search(r"1-train: roughly .* (h|days) for 12 steps", first)
    assert run() == 0
    assert "times as fast as the measured speed" in run.log
    capsys.readouterr()
    monkeypatch.setattr(resources, "rates_age", lambda dtype: 3 * 86400.0)
    assert run("--dry-run", f"output={tmp_path / 'other'}") == 0
    second = capsys.readouterr().out
    assert re.search(r"1-train: roughly [0-9]+ s for 12 steps", second)
    assert "at the speed measured 3 days ago;" in second


def test_the_work_of_a_baseline_is_not_that_of_its_training(
    make_checkpoint, tmp_path, monkeypatch
):
    counted, qat = [], {"qat": {"bits": 4, "group_size": 32}}
    monkeypatch.setattr(
        train_run, "correct_rates", lambda dtype, done, seconds: counted.append(done)
    )
    model = make_checkpoint()
    for compares in (False, True):
        train = TRAIN | qat | {"compare_full_precision": compares}
        run = Run(tmp_path, {"train": train}, model=model)
        assert run("--ignore-limits", f"output={tmp_path / str(compares)}") == 0
    assert counted[0] == counted[1]


QAT = {"qat": {"bits": 4, "group_size": 32}}


@pytest.mark.parametrize(
    "keys",
    [{}, QAT | {"teacher": {}}, QAT | {"compare_full_precision": True}],
    ids=["plain", "teacher", "baseline"],
)
@pytest.mark.parametrize("held_out", [False, True])
def test_dry_run_counts_all_passes_of_a_run(
    keys, held_out, make_checkpoint, tmp_path, monkeypatch
):
    """A step counts thrice, and validations and measured models are most of it."""
    teacher, tokens = "teacher" in keys, []

    def count(owner, name: str, place: int, passes: int) -> None:
        real = getattr(owner, name)

        def counted(*arguments):
            given = [*arguments]
            given[place] = [*given[place]]
            size = sum(batch.tokens[:, 1:].size for batch in given[place])
            tokens.append(passes * size)
            return real(*given)

        monkeypatch.setattr(owner, name, counted)

    count(TrainStep, "__call__", 1, 3 + teacher)
    count(TrainStep, "evaluate", 1, 1 + teacher)
    count(train_run, "measure_perplexity", 1, 1)
    count(fp_baseline, "measure_per_sequence", 2, 2)
    train = TRAIN | keys | {"batch_size": 2, "eval_steps": 1}
    run = Run(tmp_path, {"train": train}, model=make_checkpoint())
    if held_out:
        del run.data["valid"]
        run.write()
    loaded = load(run.recipe, [f"output={run.output}"])
    dry_run = DryRun(loaded, plan(loaded))
    assert [*dry_run.lines()]
    [needs] = dry_run.resources.stages.values()
    active, _ = resources.model_shape(loaded).per_token
    assert run("--ignore-limits") == 0
    passes = (needs.work.trained + needs.work.forward) / (2 * active)
    assert passes == pytest.approx(sum(tokens), rel=0.2)


def test_rates_need_no_cache(measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "cache", "~nobody-here/cache"):
        monkeypatch.setenv("LMX_CACHE", str(folder))
        assert rates(mx.float32) == SOME
    assert len(measured) == 2


def test_time_is_the_sum_over_the_kinds_of_work(measured):
    assert Work().seconds(mx.float32) == 0
    assert not measured
    amounts = Work(1, 1, 1, 1, 1) + Work(trained=2, solved=31)
    assert (amounts * 2).seconds(mx.float32) == 2 * (3 + 1 / 2 + 1 / 4 + 1 / 8 + 2)


def test_rates_are_those_of_a_model(monkeypatch):
    """Of the same work: generating one by one is slowest."""
    monkeypatch.setattr(work, "CPU_PROBE", (2, 32, 64))
    measured = work._measure(mx.float32)
    assert min(vars(measured).values()) > 1e3
    assert measured.decoded < measured.generated
    assert measured.decoded < measured.forward


def test_dry_run_says_the_time(measured, tmp_path, capsys):
    # README's first command leaves a finished run, whose stages take no time.
    recipe = ["recipes/qat_4bit.yaml", f"output={tmp_path / 'run'}", "--dry-run"]
    assert main.train(recipe) == 0
    assert "time     1-train: roughly " in capsys.readouterr().out
    assert set(measured) == {mx.float32}
