"""The distill stage through the command line, and its draft in stock mlx-lm."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from lmx.data import cache
from lmx.draft.report import MIN_SPEEDUP
from lmx.generation.engine import Generator
from lmx.models.checkpoint import weights_digest
from lmx.models.loader import load
from lmx.run.fs import hash_file
from tiny_runs import Run

ANSWERS = {
    "num_prompts": 24,
    "num_eval_prompts": 4,
    "max_tokens": 12,
    "temperatures": [0.0, 0.8],
    "top_k": 16,
}
DISTILL = {
    "draft_model": {"num_layers": 1},
    "data_generation": ANSWERS,
    "steps": 12,
    "batch_tokens": 256,
    "learning_rate": 3e-3,
    "eval_steps": 6,
    "save_steps": 4,
    "benchmark": {"num_prompts": 6, "max_tokens": 10},
}


def run_of(folder, *stages, model):
    """With room for what is to be copied."""
    run = Run(folder, *stages, model=model)
    run.data["max_seq_length"] = 128
    run.write()
    return run


@pytest.fixture(scope="module")
def distilled(base, tmp_path_factory):
    """A run that distils a draft from the trained tiny model."""
    # The model itself is the sibling: it guesses right, and nothing is won.
    trial = DISTILL["benchmark"] | {"baseline_model": str(base)}
    stage = {"draft": DISTILL | {"benchmark": trial}}
    run = run_of(tmp_path_factory.mktemp("distil"), stage, model=base)
    assert run() == 0
    return run


def answers_kept():
    return sorted((cache.root() / "completions").rglob("index.json"))


def test_draft_json_has_recommendation_and_costs(distilled, base):
    draft, report = distilled.json("draft/draft.json"), distilled.json("report.json")
    assert draft["target"] == weights_digest(base)
    assert draft["recommendation"] == (
        "recommended" if draft["speedup"] >= MIN_SPEEDUP else "not recommended"
    )
    assert (
        draft["recommendation"].capitalize()
        in (distilled.output / "draft/README.md").read_text()
    )
    assert 1 <= draft["num_draft_tokens"] <= 8
    costs = draft["costs"]["rounds"]
    assert len(costs) == 9
    assert costs[0] == 1
    assert costs == sorted(costs)
    assert draft["costs"]["prefill"] >= 0
    # What was predicted when the training ended is what the trial began with.
    expected = draft["training"]["expected"]
    for name, trial in draft["benchmark"].items():
        told = expected[f"accepted_length_{name.replace(' ', '_')}"]
        assert told == pytest.approx(trial["predicted_accepted_lengths"], rel=0.02)
    assert report["draft"]["acceptance_rate"] == draft["acceptance_rate"]
    kinds = ("", ", chat", ", copying")
    assert list(report["speculation"]) == [
        f"{how}{kind}" for how in ("greedy", "temperature 0.7") for kind in kinds
    ]
    for name, columns in report["speculation"].items():
        assert list(columns) == ["standard", "prompt_lookup", "baseline_model", "draft"]
        assert 0 <= columns["draft"]["acceptance_rate"] <= 1
        assert columns["baseline_model"]["acceptance_rate"] > (
            0.999 if "greedy" in name else 0.9
        )
    greedy = draft["benchmark"]["greedy"]
    assert greedy["draft"]["accepted_length"] == pytest.approx(
        greedy["predicted_accepted_length"]
    )


def test_card_and_page_show_every_prompt_set_and_the_baseline(distilled):
    card = (distilled.output / "draft/README.md").read_text()
    assert "|  | standard | prompt_lookup | baseline_model | draft |" in card
    page = (distilled.output / "report.html").read_text()
    for how in ("greedy", "temperature 0.7"):
        for kind in ("chat", "copying"):
            assert f"| {how}, {kind}: speed-up | 1.00x |" in card
            assert f"Speculative decoding, {how}, {kind}" in page
    rows = re.findall(r"<tr><th[^>]*>(\w+)</th>(.*?)</tr>", page, re.DOTALL)
    shown = [cells for name, cells in rows if name == "baseline_model"]
    assert len(shown) == 6
    assert not any("-" in re.sub(r"<[^>]+>", " ", cells) for cells in shown)


def test_baseline_model_with_other_tokenizer_is_refused_before_training(
    distilled, tmp_path, capsys
):
    other = tmp_path / "other"
    shutil.copytree(distilled.model, other)
    words = json.loads((other / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(words))
    trial = DISTILL["benchmark"] | {"baseline_model": str(other)}
    stage = {"draft": DISTILL | {"benchmark": trial}}
    run = run_of(tmp_path, stage, model=distilled.model)
    assert run() == 2
    assert "baseline model" in capsys.readouterr().err
    assert not (run.output / "metrics.jsonl").exists()


def test_draft_training_logs_bounds_lengths_and_prediction(distilled):
    rows = [row for row in distilled.rows() if row["kind"] == "draft"]
    assert [row["step"] for row in rows] == [0, 6, 12]
    for row in rows:
        assert row["acceptance_lower_bound"] <= row["acceptance_upper_bound"] <= 1
        assert len(row["accepted_length"]) == 8
        assert row["accepted_length"] == sorted(row["accepted_length"])
        assert row["predicted_speedup"] > 0
    assert rows[-1]["acceptance_lower_bound"] > rows[0]["acceptance_lower_bound"]
    assert "MB on disk" in distilled.log


def test_completions_are_generated_once_for_several_losses(distilled, tmp_path):
    before = answers_kept()
    other = {
        **DISTILL,
        "draft_model": {"init_from": str(distilled.model), "num_layers": [1]},
        "loss": "reverse_kl",
        "quantization": {"bits": 8, "group_size": 32},
    }
    run = run_of(tmp_path, {"draft": other}, "export", model=distilled.model)
    assert run() == 0
    assert run.json("draft/draft.json")["target"] == weights_digest(
        run.output / "model"
    )
    assert answers_kept() == before
    assert "generated 24 of 24" in distilled.log
    assert "generated 24 of 24" not in run.log
    assert "MB on disk" not in run.log
    config = json.loads((run.output / "draft/config.json").read_text())
    assert config["quantization"]["bits"] == 8


def test_missed_draft_threshold_publishes_nothing(distilled, tmp_path):
    fresh = {"from_scratch": True, "num_layers": 1}
    gates = {
        **DISTILL,
        "draft_model": fresh,
        "steps": 1,
        "thresholds": {"min_acceptance_rate": 1.0},
    }
    run = run_of(tmp_path, {"draft": gates}, "export", model=distilled.model)
    assert run() == 1
    assert "acceptance_rate" in run.log
    assert run.json("report.json")["draft"]["acceptance_rate"] < 1
    assert not (run.output / "draft").exists()


def test_draft_depth_is_chosen_by_predicted_speedup(distilled, tmp_path):
    auto = {
        **DISTILL,
        "draft_model": {"num_layers": "auto", "intermediate_size": 32},
        # The target runs beside the draft.
        "data_generation": {**ANSWERS, "top_k": None},
        "steps": 2,
    }
    run = run_of(tmp_path, {"draft": auto}, model=distilled.model)
    assert run() == 0
    config = json.loads((run.output / "draft/config.json").read_text())
    assert config["num_hidden_layers"] in (1, 2)
    assert config["intermediate_size"] == 32
    assert "MB on disk" not in run.log
    last = [row for row in run.rows() if row["kind"] == "draft"][-1]
    assert last["acceptance_lower_bound"] == last["acceptance_upper_bound"]


def test_interrupted_draft_training_resumes_exactly(distilled, tmp_path):
    run = run_of(tmp_path, {"draft": DISTILL}, model=distilled.model)
    assert run.attacked("SIGTERM", "step", 7).returncode == 130
    assert run() == 0
    assert "resuming after step 7" in run.log
    file = "draft/model.safetensors"
    assert hash_file(run.output / file) == hash_file(distilled.output / file)


def test_interrupted_on_policy_training_resumes_exactly(distilled, tmp_path_factory):
    replayed = {
        "on_policy": {"fraction": 0.5, "rollout_tokens": 3, "rollout_interval": 2}
    }
    stage = {"draft": DISTILL | replayed | {"steps": 8}}
    files = []
    for name, stop in (("whole", None), ("stopped", 5)):
        folder = tmp_path_factory.mktemp(name)
        run = run_of(folder, stage, model=distilled.model)
        if stop:
            assert run.attacked("SIGTERM", "step", stop).returncode == 130
        assert run() == 0
        files.append(run.output / "draft/model.safetensors")
        assert re.search(r"step 4: replaying \d+ rejected draft tokens", run.log)
        assert len(list(run.output.glob("stages/*/replays/*.json"))) == 2
    assert f"resuming after step {stop}" in run.log
    assert hash_file(files[0]) == hash_file(files[1])


def test_model_change_after_draft_is_refused(distilled, tmp_path, capsys):
    run = run_of(
        tmp_path, {"draft": DISTILL}, {"quantize": {"bits": 4}}, model=distilled.model
    )
    assert run() == 2
    assert "distil last" in capsys.readouterr().err


def texts(distilled, prompt):
    """What the target says alone, greedily."""
    loaded = load(distilled.model)
    generator = Generator(loaded.model, loaded.tokenizer)
    return loaded, generator.chat(prompt, max_tokens=12)


def test_mlx_lm_output_is_unchanged_by_the_draft(distilled):
    import mlx.core as mx
    from mlx_lm import load as stock_load
    from mlx_lm.generate import speculative_generate_step

    loaded, ours = texts(distilled, "Add 3 and 3.")
    draft, tokenizer = stock_load(str(distilled.output / "draft"))
    assert tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    prompt = mx.array(
        Generator(loaded.model, loaded.tokenizer).encode_chat("Add 3 and 3.")
    )
    steps = speculative_generate_step(
        prompt, loaded.model, draft, num_draft_tokens=3, max_tokens=len(ours.tokens)
    )
    assert [token for token, *_ in steps] == ours.tokens


def test_mlx_lm_server_output_is_unchanged_by_the_draft(distilled, tmp_path):
    _, ours = texts(distilled, "Add 4 and 4.")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    models = ["--model", distilled.model, "--draft-model", distilled.output / "draft"]
    place = ["--host", "127.0.0.1", "--port", port, "--num-draft-tokens", 3]
    command = [sys.executable, "-m", "mlx_lm", "server", *models, *place]
    server = subprocess.Popen(
        [*map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        chat = {"messages": [{"role": "user", "content": "Add 4 and 4."}]}
        body = json.dumps({**chat, "max_tokens": 12, "temperature": 0.0}).encode()
        address = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = json.loads(_asked(address, body))
        streaming = json.loads(body) | {"stream": True}
        pieces = _asked(address, json.dumps(streaming).encode())
    finally:
        server.terminate()
        server.wait(timeout=20)
    assert answer["choices"][0]["message"]["content"] == ours.text
    events = [line.removeprefix("data: ") for line in pieces.splitlines()]
    events = [json.loads(event) for event in events if event.startswith("{")]
    assert len(events) > 1
    streamed = [event["choices"][0]["delta"].get("content") for event in events]
    assert "".join(filter(None, streamed)) == ours.text


def _asked(url, body):
    """What the server answers, once it is there."""
    end = time.monotonic() + 90
    while True:
        try:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(url, body, headers)
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.read().decode()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.3)
