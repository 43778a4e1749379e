"""Tasks of lm-evaluation-harness from files, compared with manual scores."""

import json
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
import yaml
from lmx.cli import main
from lmx.config.evaluate import EvaluateConfig
from lmx.errors import UserError
from lmx.evaluation import lm_eval
from lmx.installation import install_command
from lmx.models.loader import load
from lmx.pipeline.evaluate.stage import EvaluateStage
from lmx.run.tables import metrics_table

TASK = {
    "task": "colours",
    "dataset_path": "json",
    "test_split": "train",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    ],
}
COLOURS = [" blue", " green", " red", " a colour nobody has seen"]


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A local task of questions with four answers."""
    pytest.importorskip("lm_eval")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    documents = [
        {"question": f"Thing {n} is", "choices": COLOURS, "answer": n % 4}
        for n in range(12)
    ]
    data = tmp_path / "colours.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    path = tmp_path / "colours.yaml"
    kwargs = {"data_files": str(data)}
    path.write_text(yaml.safe_dump(TASK | {"dataset_kwargs": kwargs}))
    return path, documents


def likelihood(loaded, context, answer):
    """Log-likelihood of an answer, from one forward pass over the whole text."""
    start = len(loaded.tokenizer.encode(context))
    tokens = loaded.tokenizer.encode(context + answer)
    scores = nn.log_softmax(loaded.model(mx.array([tokens]))[0], axis=-1)
    return sum(scores[n - 1, tokens[n]].item() for n in range(start, len(tokens)))


def test_measure_tasks_scores_the_loaded_model(task, make_checkpoint):
    path, documents = task
    loaded = load(make_checkpoint())
    loaded.tokenizer.chat_template = None
    picked = []
    for document in documents:
        scores = [likelihood(loaded, document["question"], c) for c in COLOURS]
        picked.append(scores.index(max(scores)) == document["answer"])
    [(name, scores)] = lm_eval.measure_tasks(loaded, [path]).items()
    assert name == "colours"
    assert scores["acc"] == pytest.approx(sum(picked) / len(picked))
    assert 0 < scores["acc"] < 1
    assert scores.keys() == {"acc", "acc_stderr"}
    few = lm_eval.measure_tasks(loaded, [path], limit=5)["colours"]
    assert few["acc"] == pytest.approx(sum(picked[:5]) / 5)


@pytest.mark.usefixtures("task")
def test_run_reports_task_scores_of_every_model(make_checkpoint, tmp_path):
    documents = tmp_path / "rows.jsonl"
    documents.write_text('{"prompt": "a", "completion": "b c d"}\n' * 8)
    quantize = {"quantize": {"bits": 4, "group_size": 32}}
    validate = {"num_tokens": 8, "latency_tokens": 8, "tasks": ["colours.yaml"]}
    recipe = {
        "model": str(make_checkpoint()),
        "data": {"valid": str(documents)},
        "stages": [quantize, {"evaluate": validate}, {"export": None}],
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert main.train(["r.yaml", "output=out"]) == 0
    models = json.loads((tmp_path / "out/report.json").read_text())["models"]
    assert set(models) == {"base", "quantized"}
    for figures in models.values():
        assert 0 <= figures["tasks"]["colours"]["acc"] <= 1
    assert "| colours: acc | " in (tmp_path / "out/model/README.md").read_text()


def test_require_refuses_an_unknown_task(task, monkeypatch):
    path, _ = task
    known = SimpleNamespace(task_index={"arc_easy": None})
    monkeypatch.setattr(lm_eval, "_manager", lambda with_names: known)
    lm_eval.require([str(path), "arc_easy"])
    with pytest.raises(UserError, match="has no task") as caught:
        lm_eval.require([str(path), "arc_easi"])
    assert caught.value.place == "arc_easi"


def test_measure_tasks_reports_missing_documents(task, make_checkpoint):
    path, _ = task
    (path.parent / "colours.jsonl").unlink()
    with pytest.raises(UserError, match="cannot be measured") as caught:
        lm_eval.measure_tasks(load(make_checkpoint()), [path])
    assert caught.value.place == str(path)


def test_missing_extra_or_task_file_is_a_recipe_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(
        "model: a/b\ndata: {valid: builtin:stdlib}\n"
        "stages: [{evaluate: {tasks: [mine.yaml]}}]\n"
    )
    monkeypatch.setattr(lm_eval, "is_installed", lambda: False)
    assert main.train(["r.yaml", "--dry-run"]) == 2
    message = capsys.readouterr().err
    assert "r.yaml:3:22: lm-evaluation-harness is not installed" in message
    assert install_command("eval") in message
    assert "no such file or folder: 'mine.yaml'" in message


def test_tasks_are_refused_with_several_processes():
    stage = EvaluateStage(EvaluateConfig(tasks=["a.yaml"]))
    stage.check_ranks(SimpleNamespace(size=1))
    with pytest.raises(UserError, match="run in one process"):
        stage.check_ranks(SimpleNamespace(size=2))


def test_table_rows_of_tasks():
    speed = {"ttft_ms": {"p50": 1}, "decode_tokens_per_second": {"p50": 1}}
    plain = {"bytes": 1, "generation": speed}
    models = {
        "base": plain,
        "fine-tuned": plain
        | {"tasks": {"sums": {"acc": 0.5, "acc_stderr": 0.125, "match,strict": 1.0}}},
    }
    _, documents = metrics_table(models)
    assert documents[-2:] == [
        ["sums: acc", "-", "0.500 ± 0.125"],
        ["sums: match,strict", "-", "1.000"],
    ]
