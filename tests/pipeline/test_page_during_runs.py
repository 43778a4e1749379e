"""report.html shows a run while it is going on."""

from lmx.run import logger
from lmx.training.trainer import Trainer
from tiny_runs import METRICS_ONLY, TRAIN, Run


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
    assert "1-train-learning_rate" in during
    assert 'http-equiv="refresh"' in during
    assert 'http-equiv="refresh"' not in after
