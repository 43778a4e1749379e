"""The draft stage with drafters on hidden states, from the command line."""

import json

import pytest
from lmx.cli import main
from lmx.generation.generator import Generator
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.factory import drafter_proposer
from lmx.models.drafters.io import ARCHITECTURES, load_drafter
from lmx.models.loader import load
from tiny_checkpoints import LLAMA
from tiny_runs import Run

RTN = {"quantize": {"bits": 4, "group_size": 32}}
DRAFT = {
    "drafter": {"num_draft_tokens": 3, "num_layers": 1},
    "data_generation": {
        "num_prompts": 24,
        "num_eval_prompts": 4,
        "max_tokens": 12,
        "text_tokens": 900,
        "top_k": 16,
    },
    "steps": 12,
    "batch_tokens": 256,
    "learning_rate": 3e-3,
    "eval_steps": 6,
    "save_steps": 4,
    "benchmark": {"num_prompts": 4, "max_tokens": 10},
}


def make_run(folder, architecture, model, *stages, **settings):
    """A run with room for the copying prompts."""
    stage = {"draft": DRAFT | {"architecture": architecture} | settings}
    run = Run(folder, *stages, stage, "export", model=model)
    run.data["max_seq_length"] = 128
    run.write()
    return run


@pytest.fixture(scope="module", params=ARCHITECTURES)
def drafter_run(base, tmp_path_factory, request):
    """A run that trains a drafter for a quantized model."""
    folder = tmp_path_factory.mktemp(request.param)
    run = make_run(folder, request.param, base, RTN)
    assert run() == 0
    return run


def test_report_and_metrics_have_rates_by_position(drafter_run):
    draft = drafter_run.json("draft/draft.json")
    assert draft["architecture"] in ARCHITECTURES
    greedy = draft["benchmark"]["greedy"]
    # The teacher-forced prediction is exact for greedy decoding.
    assert greedy["draft"]["accepted_length"] == pytest.approx(
        greedy["predicted_accepted_length"]
    )
    assert len(greedy["predicted_accepted_lengths"]) == 3
    rates = greedy["draft"]["acceptance_rate_by_position"]
    assert len(rates) == greedy["draft"]["num_draft_tokens"]
    assert all(0 <= rate <= 1 for rate in rates)
    validations = [r for r in drafter_run.records() if r["kind"] == "valid"]
    assert [record["step"] for record in validations] == [0, 6, 12]
    assert {"acceptance_1", "acceptance_2", "acceptance_3"} <= validations[0].keys()
    assert validations[-1]["loss"] < validations[0]["loss"]
    assert "hidden states of" in drafter_run.log
    assert "steps 1 to 6 train on text" in drafter_run.log


def test_weights_with_the_longest_accepted_length_are_published(drafter_run):
    lengths = {
        record["step"]: record["accepted_length_all"]
        for record in drafter_run.records()
        if record["kind"] == "draft"
    }
    assert [*lengths] == [0, 6, 12]
    best = max(lengths, key=lengths.get)
    assert drafter_run.json("draft/draft.json")["training"]["steps"] == best
    page = (drafter_run.output / "report.html").read_text()
    assert "Accepted length" in page


def test_published_drafter_drafts_for_its_target(drafter_run, capsys):
    model, folder = drafter_run.output / "model", drafter_run.output / "draft"
    loaded = load(model)
    drafter = load_drafter(folder, loaded.model)
    prompt = [5, 9, 2, 40, 41, 7]
    plain = Generator(loaded.model, loaded.tokenizer)
    speculative = Generator(
        loaded.model,
        loaded.tokenizer,
        make_proposer=lambda cache: drafter_proposer(drafter, cache),
        draft_length=DraftLengthController(fixed=3),
    )
    options = {"max_tokens": 24, "stop_tokens": ()}
    assert (
        speculative.generate(prompt, **options).tokens
        == plain.generate(prompt, **options).tokens
    )
    assert speculative.speculative_stats.rounds > 0
    arguments = ["generate", str(model), "--prompt", "Add 1.", "--max-tokens", "8"]
    assert main.main(arguments) == 0
    expected = capsys.readouterr().out
    assert main.main([*arguments, "--draft-model", str(folder)]) == 0
    assert capsys.readouterr().out == expected


def test_drafter_of_another_target_is_refused(drafter_run, make_checkpoint, capsys):
    other = make_checkpoint(LLAMA, dtype="float32")
    folder = drafter_run.output / "draft"
    words = ["generate", str(other), "--prompt", "x", "--draft-model", str(folder)]
    code = main.main(words)
    assert code == 2
    assert str(folder) in capsys.readouterr().err


def test_block_that_the_target_lacks_is_refused_before_training(base, tmp_path, capsys):
    settings = {"drafter": {"layer_ids": [0, 70], "num_draft_tokens": 2}}
    run = make_run(tmp_path, "eagle3", base, **settings)
    assert run() == 2
    assert "has blocks 0 to" in capsys.readouterr().err
    assert not (run.output / "draft").exists()


def test_dry_run_states_bytes_of_hidden_states(base, tmp_path, capsys):
    limited = DRAFT["data_generation"] | {"max_hidden_states_gb": 0}
    for data, is_stated in ((DRAFT["data_generation"], True), (limited, False)):
        run = make_run(tmp_path, "dflash", base, data_generation=data)
        assert run("--dry-run") == 0
        assert ("hidden states: " in capsys.readouterr().out) == is_stated


def test_online_states_give_the_same_kind_of_drafter(base, tmp_path):
    settings = DRAFT["data_generation"] | {"max_hidden_states_gb": 0, "top_k": None}
    run = make_run(tmp_path, "eagle3", base, data_generation=settings)
    assert run() == 0
    assert "computed in every step" in run.log
    losses = [r["loss"] for r in run.records() if r["kind"] == "valid"]
    assert losses[-1] < losses[0]
    config = json.loads((run.output / "draft/config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
