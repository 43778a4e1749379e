"""The draft stage from the command line, and its draft model in mlx-lm."""

import json
import math
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import mlx.core as mx
import mlx_lm
import pytest
from lmx.data import cache
from lmx.draft.report import MIN_SPEEDUP
from lmx.generation.generator import Generator
from lmx.models.checkpoint import weights_digest
from lmx.models.loader import load
from page_data import sections
from tiny_runs import Run

DATA_GENERATION = {
    "num_prompts": 24,
    "num_eval_prompts": 4,
    "max_tokens": 12,
    "temperatures": [0.0, 0.8],
    "text_tokens": 600,
    "top_k": 16,
}
DRAFT = {
    "draft_model": {"num_layers": 1},
    "data_generation": DATA_GENERATION,
    "steps": 12,
    "batch_tokens": 256,
    "learning_rate": 3e-3,
    "eval_steps": 6,
    "save_steps": 4,
    "benchmark": {"num_prompts": 6, "max_tokens": 10},
}


def make_run(folder, *stages, model):
    """A run with room for the copying prompts."""
    run = Run(folder, *stages, model=model)
    run.data["max_seq_length"] = 128
    run.write()
    return run


@pytest.fixture(scope="module")
def draft_run(base, tmp_path_factory):
    """A run that trains a draft model for the trained tiny model."""
    run = make_run(tmp_path_factory.mktemp("distil"), {"draft": DRAFT}, model=base)
    assert run() == 0
    return run


def cached_completions():
    return sorted((cache.root() / "completions").rglob("index.json"))


def test_draft_json_has_recommendation_and_costs(draft_run, base):
    draft, report = draft_run.json("draft/draft.json"), draft_run.json("report.json")
    assert draft["target"] == weights_digest(base)
    recommendation = (
        "recommended" if draft["speedup"] >= MIN_SPEEDUP else "not recommended"
    )
    assert draft["recommendation"] == recommendation
    card = (draft_run.output / "draft/README.md").read_text()
    assert recommendation.capitalize() in card
    assert 1 <= draft["num_draft_tokens"] <= 8
    costs = draft["costs"]["rounds"]
    assert len(costs) == 9
    assert costs[0] == 1
    assert costs == sorted(costs)
    assert draft["costs"]["prefill"] >= 0
    # The benchmark starts from the prediction of the last validation.
    expected = draft["training"]["expected"]
    for name, benchmark in draft["benchmark"].items():
        predicted = expected[f"accepted_length_{name.replace(' ', '_')}"]
        lengths = pytest.approx(benchmark["predicted_accepted_lengths"], rel=0.02)
        assert predicted == lengths
    assert report["draft"]["acceptance_rate"] == draft["acceptance_rate"]
    names = [
        f"{sampling}{prompt_set}"
        for sampling in ("greedy", "temperature 0.7")
        for prompt_set in ("", ", chat", ", copying")
    ]
    assert [*report["speculation"]] == names
    for columns in report["speculation"].values():
        assert list(columns) == ["standard", "prompt_lookup", "draft"]
        assert 0 <= columns["draft"]["acceptance_rate"] <= 1
    greedy = draft["benchmark"]["greedy"]
    accepted = pytest.approx(greedy["predicted_accepted_length"])
    assert greedy["draft"]["accepted_length"] == accepted


def test_card_and_page_show_every_prompt_set(draft_run):
    card = (draft_run.output / "draft/README.md").read_text()
    assert "|  | standard | prompt_lookup | draft |" in card
    page = (draft_run.output / "report.html").read_text()
    for sampling in ("greedy", "temperature 0.7"):
        for prompt_set in ("chat", "copying"):
            assert f"| {sampling}, {prompt_set}: speed-up | 1.00x |" in card
            assert f"Speculative decoding, {sampling}, {prompt_set}" in page
    shown = [
        row[table["columns"].index("draft")]
        for table in sections(page)["speculative_decoding"]
        if "draft" in table["columns"]
        for row in table["rows"]
    ]
    assert len(shown) == 6 * 3
    assert "-" not in shown


def test_draft_training_logs_bounds_lengths_and_prediction(draft_run):
    records = [record for record in draft_run.records() if record["kind"] == "draft"]
    assert [record["step"] for record in records] == [0, 6, 12]
    for record in records:
        assert record["acceptance_lower_bound"] <= record["acceptance_upper_bound"] <= 1
        assert len(record["accepted_length"]) == 8
        assert record["accepted_length"] == sorted(record["accepted_length"])
        assert record["predicted_speedup"] > 0
    assert records[-1]["acceptance_lower_bound"] > records[0]["acceptance_lower_bound"]
    assert "MB on disk" in draft_run.log


@pytest.mark.slow
def test_completions_are_generated_once_for_several_drafts(draft_run, tmp_path):
    completions = cached_completions()
    assert completions
    other = {
        **DRAFT,
        "draft_model": {"init_from": str(draft_run.model), "num_layers": [1]},
        "ce_weight": 0.5,
        "quantization": {"bits": 8, "group_size": 32},
    }
    run = make_run(tmp_path, {"draft": other}, "export", model=draft_run.model)
    assert run() == 0
    assert run.json("draft/draft.json")["target"] == weights_digest(
        run.output / "model"
    )
    assert cached_completions() == completions
    assert "MB on disk" not in run.log
    config = json.loads((run.output / "draft/config.json").read_text())
    assert config["quantization"]["bits"] == 8


def test_missed_draft_threshold_publishes_nothing(draft_run, tmp_path):
    config = {
        **DRAFT,
        "draft_model": {"num_layers": 1},
        "steps": 1,
        "thresholds": {"min_acceptance_rate": 1.0},
    }
    run = make_run(tmp_path, {"draft": config}, "export", model=draft_run.model)
    assert run() == 1
    assert "acceptance_rate" in run.log
    assert run.json("report.json")["draft"]["acceptance_rate"] < 1
    assert not (run.output / "draft").exists()


@pytest.mark.slow
def test_online_target_bounds_the_acceptance_exactly(draft_run, tmp_path):
    online = {
        **DRAFT,
        "draft_model": {},
        "data_generation": {**DATA_GENERATION, "top_k": None},
        "steps": 2,
    }
    run = make_run(tmp_path, {"draft": online}, model=draft_run.model)
    assert run() == 0
    config = json.loads((run.output / "draft/config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert "MB on disk" not in run.log
    last = [record for record in run.records() if record["kind"] == "draft"][-1]
    assert last["acceptance_lower_bound"] == last["acceptance_upper_bound"]


def test_model_change_after_draft_is_refused(draft_run, tmp_path, capsys):
    run = make_run(
        tmp_path, {"draft": DRAFT}, {"quantize": {"bits": 4}}, model=draft_run.model
    )
    assert run() == 2
    assert "distil last" in capsys.readouterr().err


def test_mlx_lm_server_output_is_unchanged_by_the_draft(draft_run, tmp_path):
    loaded = load(draft_run.model)
    expected = Generator(loaded.model, loaded.tokenizer).chat(
        "Add 4 and 4.", max_tokens=12
    )
    _, tokenizer = mlx_lm.load(str(draft_run.output / "draft"))
    assert tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    models = ["--model", draft_run.model, "--draft-model", draft_run.output / "draft"]
    options = ["--host", "127.0.0.1", "--port", port, "--num-draft-tokens", 3]
    command = [sys.executable, "-m", "mlx_lm", "server", *models, *options]
    server = subprocess.Popen(
        [*map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        chat = {"messages": [{"role": "user", "content": "Add 4 and 4."}]}
        body = json.dumps({**chat, "max_tokens": 12, "temperature": 0.0}).encode()
        address = f"http://127.0.0.1:{port}/v1/chat/completions"
        response = json.loads(_post(address, body))
        streaming = json.loads(body) | {"stream": True}
        stream = _post(address, json.dumps(streaming).encode())
    finally:
        server.terminate()
        server.wait(timeout=20)
    assert response["choices"][0]["message"]["content"] == expected.text
    events = [line.removeprefix("data: ") for line in stream.splitlines()]
    events = [json.loads(event) for event in events if event.startswith("{")]
    assert len(events) > 1
    streamed = [event["choices"][0]["delta"].get("content") for event in events]
    assert "".join(filter(None, streamed)) == expected.text


def _post(url, body):
    """POST to the server; retry until it listens."""
    deadline = time.monotonic() + 90
    while True:
        try:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(url, body, headers)
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.read().decode()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)


def widened(base, folder, rows):
    """The model with `rows` more rows of embedding and LM head, without a token."""
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    vocab_size = config["vocab_size"]
    config["vocab_size"] += rows
    (folder / "config.json").write_text(json.dumps(config))
    file = str(folder / "model.safetensors")
    weights = {
        name: mx.pad(value, [(0, rows), (0, 0)])
        if value.shape[0] == vocab_size
        else value
        for name, value in mx.load(file).items()
    }
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "mlx"})
    return folder


def validation_losses(run):
    return [r["loss"] for r in run.records() if r["kind"] == "valid" and "loss" in r]


@pytest.mark.parametrize(
    ("wider", "top_k"),
    [
        ("draft", 16),
        pytest.param("target", None, marks=pytest.mark.slow),
    ],
)
def test_target_and_draft_model_may_pad_the_vocabulary_differently(
    base, tmp_path, wider, top_k
):
    models = {"target": base, "draft": base}
    models[wider] = widened(base, tmp_path / "wide", rows=128)
    data = DATA_GENERATION | {"top_k": top_k, "temperatures": [0.0]}
    draft = DRAFT | {
        "draft_model": {"init_from": str(models["draft"]), "num_layers": 1},
        "data_generation": data,
        "steps": 2,
    }
    run = make_run(tmp_path, {"draft": draft}, model=models["target"])
    assert run() == 0
    losses = validation_losses(run)
    assert all(math.isfinite(loss) and loss < 10 for loss in losses)
    if wider == "target":
        # Its rows without a token change nothing.
        draft["draft_model"]["init_from"] = str(base)
        (tmp_path / "same").mkdir()
        same = make_run(tmp_path / "same", {"draft": draft}, model=base)
        assert same() == 0
        assert losses == pytest.approx(validation_losses(same), rel=1e-3)
