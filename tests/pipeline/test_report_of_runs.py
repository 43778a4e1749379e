"""The report page of running, finished, failed and interrupted runs."""

import shutil

import pytest
from lmx.cli import main
from lmx.run import logger
from lmx.training.trainer import Trainer
from page_data import charts, rows, sections
from tiny_runs import METRICS_ONLY, TRAIN, Run


def page(run):
    return (run.output / "report.html").read_text()


def test_report_page_has_every_section(full_run):
    html = page(full_run)
    shown = ["thresholds", "models", "curves_of_1-train", "layers", "samples"]
    measured = [name for name in sections(html) if name != "speculative_decoding"]
    assert measured == [*shown, "commands", "recipe", "versions_and_hashes"]
    assert ["Status", "done"] in rows(html)
    assert f"{full_run.output}/report.html" in full_run.log.splitlines()[-3]
    models = full_run.json("report.json")["models"]
    assert f"{models['quantized']['perplexity']:.3f}" in html


def test_report_json_has_layers_and_samples(full_run):
    report = full_run.json("report.json")
    fine_tuned, quantized = report["models"].values()
    assert "layers" not in fine_tuned
    assert {layer["bits"] for layer in quantized["layers"].values()} == {4}
    assert all(1e-4 < v["error"] < 0.1 for v in quantized["layers"].values())
    assert len(report["samples"]) == 4
    for sample in report["samples"]:
        assert sample["prompt"].startswith("Add")
        assert "together are" in sample["expected"]
        assert set(sample["answers"]) == {"fine-tuned", "quantized"}


def test_report_page_is_rebuilt_from_the_run_directory(full_run, tmp_path, capsys):
    copy = tmp_path / "elsewhere"
    shutil.copytree(
        full_run.output, copy, ignore=shutil.ignore_patterns("*.safetensors")
    )
    (copy / "report.html").unlink()
    assert main.main(["report", str(copy)]) == 0
    assert (copy / "report.html").read_text() == page(full_run)


def test_page_is_written_while_a_stage_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(logger, "HEARTBEAT_SECONDS", 0.01)
    run = Run(tmp_path, {"train": TRAIN}, {"evaluate": METRICS_ONLY})
    real, pages = Trainer._evaluate, []

    def evaluate(self):
        page = run.output / "report.html"
        pages.append(page.read_text() if page.exists() else "")
        return real(self)

    monkeypatch.setattr(Trainer, "_evaluate", evaluate)
    assert run() == 0
    during, after = pages[-1], (run.output / "report.html").read_text()
    assert "Learning rate" in [chart["title"] for chart in charts(during)]
    assert 'http-equiv="refresh"' in during
    assert 'http-equiv="refresh"' not in after


@pytest.mark.parametrize(
    ("teacher", "is_shown"), [({}, True), ({"ce_weight": 0.5}, False)]
)
def test_page_shows_what_training_adds_over_codes(base, tmp_path, teacher, is_shown):
    """The teacher's divergence by trained tokens, and that of the quantized model."""
    grid = {"bits": 2, "group_size": 32}
    train = TRAIN | {"qat": grid | {"quantizer": "lsq"}, "teacher": teacher}
    stages = {"quantize": grid}, {"train": train}, {"train": train}
    run = Run(tmp_path, *stages, model=base)
    assert run() == 0
    shown = sections(page(run))
    # The last stage trains a model that was trained.
    assert "Validation KL" not in [c["title"] for c in shown["curves_of_3-train"]]
    charts_of_stage = shown["curves_of_2-train"]
    assert (charts_of_stage[0]["title"] == "Validation KL") == is_shown
    if not is_shown:
        return
    records = [r for r in run.records() if r["stage"] == "2-train"]
    valid = [r for r in records if r["kind"] == "valid"]
    trained = {r["step"]: r["trained_tokens"] for r in records if r["kind"] == "train"}
    assert [r["trained_tokens"] for r in valid] == [
        trained.get(r["step"], 0) for r in valid
    ]
    (name, points), (codes, line) = charts_of_stage[0]["lines"]
    assert (name, codes) == ("QAT", "rtn alone")
    assert points == [
        [r["trained_tokens"], pytest.approx(r["loss"], rel=1e-5)] for r in valid
    ]
    assert {value for _, value in line} == {points[0][1]}
    assert [tokens for tokens, _ in line] == [tokens for tokens, _ in points]
    table = charts_of_stage[0]["table"]
    assert table["title"] == "Validation KL, nats per token from the teacher"
    assert table["columns"] == ["trained tokens", "QAT", "rtn alone"]
