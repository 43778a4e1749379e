"""lm-evaluation-harness measures a served model as it measures a loaded one."""

import json

import pytest
import yaml
from lmx.evaluation.lm_eval import measure_tasks
from lmx.generation.generator import Generator
from lmx.models.loader import load as load_model
from tiny_server import COMPLETIONS, load

COLOURS = [" blue", " green", " red", " a colour nobody has seen"]
TASKS = {
    "colours": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm")],
    },
    "greedy": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "metric_list": [{"metric": name} for name in ("perplexity", "acc")],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Files of local tasks, of every kind but texts without a question: mlx-lm does not
    score their first token, local-completions does."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")  # of lm_eval[api]
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    documents = [
        {"question": f"Thing {n} is", "choices": COLOURS, "answer": n % 4}
        for n in range(6)
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(document) + "\n" for document in documents))
    source = {"dataset_path": "json", "test_split": "train"}
    source["dataset_kwargs"] = {"data_files": str(rows)}
    paths = []
    for name, task in TASKS.items():
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(yaml.safe_dump({"task": name} | source | task))
    return paths


@pytest.mark.slow
def test_a_served_model_has_the_scores_of_a_loaded_one(tasks, make_checkpoint, start):
    # The harness does not do so after mlx-lm has registered its own.
    import lm_eval.models  # noqa: F401
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = make_checkpoint()
    loaded = load_model(folder)
    loaded.tokenizer.chat_template = None
    expected = measure_tasks(loaded, tasks)
    server = start(load(lambda: Generator(loaded.model, loaded.tokenizer)))
    url = f"{server.url}{COMPLETIONS}"
    model = {"model": "tiny", "base_url": url, "tokenizer": str(folder)}
    options = {"tokenizer_backend": "huggingface", "batch_size": 4}
    results = simple_evaluate(
        model="local-completions",
        model_args=model | options,
        tasks=[str(path) for path in tasks],
        task_manager=TaskManager(include_defaults=False),
        log_samples=False,
    )["results"]
    assert expected.keys() == results.keys() == TASKS.keys()
    for task, scores in expected.items():
        for name, value in scores.items():
            if not name.endswith("stderr"):
                measured = results[task][f"{name},none"]
                assert measured == pytest.approx(value, rel=1e-4), (task, name)
    assert 0 < expected["colours"]["acc"] < 1
