"""`--dry-run` shows the model, the data and the cost, and refuses what does not fit."""

import json
from pathlib import Path

import pytest
from lmx.cli import main
from lmx.data.record_formats import DataRecord
from lmx.files.atomic import free_bytes
from lmx.pipeline import dry_run, resources
from sized_models import write_rows, write_sized

CHAT = {
    "messages": [
        {"role": "user", "content": "count to three"},
        {"role": "assistant", "content": "one two three"},
    ]
}
RECIPE = """\
model: tiny
data: {train: rows.jsonl, max_seq_length: 64}
stages:
  - train:
      adapter: {rank: 4}
      qat: {bits: 4, group_size: 64}
      epochs: 2
      batch_size: 2
  - evaluate:
  - export:
"""
DRAFT = "stages=[{draft: {steps: 2, batch_tokens: 256, draft_model: {num_layers: 1}}}]"
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_sized(tmp_path_factory.mktemp("models"))


@pytest.fixture
def workspace(model, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(model)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    long_completion = json.loads(json.dumps(CHAT).replace("one two", "one two " * 60))
    long_prompt = json.loads(json.dumps(CHAT).replace("count", "count " * 80))
    write_rows([CHAT] * 6 + [long_completion, long_prompt, {"messages": "none"}])
    return tmp_path


def limit_memory(monkeypatch, size: float) -> None:
    monkeypatch.setattr(resources, "memory_limit", lambda: round(size))


@pytest.mark.parametrize("count", [1, 5, 99, 10_000])
def test_reservoir_samples_every_nth_example(count, monkeypatch):
    monkeypatch.setattr(dry_run, "SAMPLE_CHARACTERS", 600)
    sample = dry_run.RowReservoir()
    for number in range(count):
        sample.add_row(DataRecord(str(number), text="x" * 10))
        assert len(sample.rows) <= 60
    positions = [int(record.where) for record in sample.rows]
    assert sample.total == count
    assert positions == list(range(0, count, positions[1] if count > 1 else 1))
    assert len(positions) >= min(count, 30)
    oversized = dry_run.RowReservoir()
    oversized.add_row(DataRecord("f:1", text="x" * (dry_run.SAMPLE_CHARACTERS + 1)))
    assert len(oversized.rows) == 1


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (
            [],
            [
                "llama, 90,432 parameters, 181 kB, vocabulary 320",
                "1-train: 13 of 15 layers are quantized",
                "its width 96 is not a multiple of 64: model.layers.0.mlp.down_proj",
                "rows.jsonl: 8 examples, format chat",
                "rows.jsonl:9: example skipped: ",
                "8 of 8 examples tokenized: 7 sequences of ",
                "1 truncated, 1 skipped",
                "skipped: rows.jsonl:8: ",
                "count to three<|im_end|>\n",
                "⟦one two three<|im_end|>⟧",
                "1-train: tiny, rows.jsonl -> exports/recipe/stages/1-train",
                " for 8 steps, 2.0 epochs\n",
                "disk     needs ",
            ],
        ),
        (
            [
                "model={from_scratch: {vocab_size: 320, hidden_size: 64}}",
                "stages.train.adapter=null",
            ],
            [
                "its tokenizer is trained at the start of the run",
                "assume 3 characters per token",
                "one two three",
            ],
        ),
        (
            ["model=org/model"],
            ["org/model: not on this disk", "rows.jsonl: 8 examples"],
        ),
        (
            [DRAFT],
            ["data     1-draft: generates at most ", "(target ", " for 2 steps"],
        ),
        (
            ["stages=[{quantize: {method: gptq}}]"],
            [
                "memory   1-quantize: about ",
                "time     1-quantize: roughly ",
                "disk     1-quantize: ",
            ],
        ),
    ],
    ids=["train", "from scratch", "on the Hub", "draft", "quantize"],
)
def test_dry_run_shows_model_data_and_plan(workspace, capsys, overrides, shown):
    assert main.train(["recipe.yaml", "--dry-run", *overrides]) == 0
    output = capsys.readouterr().out
    assert [text for text in shown if text not in output] == []
    assert not (workspace / "exports").exists()


@pytest.mark.parametrize(
    ("limit", "overrides", "remedy"),
    [
        (
            "memory",
            [],
            "stages.1.train.gradient_checkpointing=true or stages.1.train.batch_size=1 "
            "stages.1.train.gradient_accumulation_steps=2 or data.max_seq_length=32",
        ),
        (
            "memory",
            [DRAFT],
            "stages.1.draft.batch_tokens=128 or "
            "stages.1.draft.draft_model.num_layers=1",
        ),
        ("disk", [], "output="),
    ],
)
def test_run_that_does_not_fit_exits_3_unless_limits_are_ignored(
    workspace, capsys, monkeypatch, limit, overrides, remedy
):
    if limit == "memory":
        limit_memory(monkeypatch, 1000)
    else:
        monkeypatch.setattr(resources, "free_bytes", lambda folder: 1000)
    assert main.train(["recipe.yaml", "--dry-run", *overrides]) == 3
    error = capsys.readouterr().err
    assert limit in error
    assert remedy in error
    ignored = ["recipe.yaml", "--dry-run", "--ignore-limits", *overrides]
    assert main.train(ignored) == 0


@pytest.mark.parametrize("words", [3, 2000], ids=["short", "one is long"])
def test_run_is_refused_if_and_only_if_its_dry_run_is(
    workspace, monkeypatch, capsys, words
):
    """Examples are shorter than max_seq_length; the long one is not sampled."""
    monkeypatch.setattr(dry_run, "SAMPLE_CHARACTERS", 100)
    write_rows(
        [{"prompt": "count", "completion": "one " * n} for n in [3, words, 3, 3]]
    )
    stages = "stages=[{train: {steps: 1, batch_size: 2, adapter: {rank: 4}}}]"
    arguments = ["recipe.yaml", "data.max_seq_length=2000", stages]
    limit_memory(monkeypatch, 20 * MEGABYTE)
    expected = 3 if words > 3 else 0
    assert main.train([*arguments, "--dry-run"]) == expected
    assert main.train([*arguments, "--quiet"]) == expected
    assert (workspace / "exports").exists() == (expected == 0)


def test_run_with_data_on_the_hub_is_refused_by_max_seq_length(
    workspace, monkeypatch, capsys
):
    limit_memory(monkeypatch, 20 * MEGABYTE)
    arguments = ["recipe.yaml", "data.max_seq_length=2000", "data.train=org/data"]
    assert main.train([*arguments, "data.valid=rows.jsonl"]) == 3


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("rows.jsonl", "", "the source has no examples"),
        ("rows.jsonl", '{"messages": [}\n', "rows.jsonl:1"),
        ("rows.jsonl", '{"colour": "red"}\n', "no dataset format matches"),
        ("recipe.yaml", RECIPE.replace("tiny", "odd"), "no model type 'abacus'"),
        (
            "recipe.yaml",
            RECIPE.partition("stages")[0]
            + "stages: [{draft: {draft_model: {num_layers: [0, 9]}}}]",
            "there is no block 9",
        ),
    ],
)
def test_unusable_files_exit_2(workspace, capsys, model, file, text, message):
    odd, config = workspace / "odd", json.loads((model / "config.json").read_text())
    odd.mkdir()
    (odd / "config.json").write_text(json.dumps(config | {"model_type": "abacus"}))
    weights = (model / "model.safetensors").read_bytes()
    (odd / "model.safetensors").write_bytes(weights)
    (workspace / file).write_text(text)
    assert main.train(["recipe.yaml", "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_free_bytes_uses_nearest_existing_folder(tmp_path):
    assert free_bytes(tmp_path / "not" / "yet") == free_bytes(tmp_path) > 0
    assert resources.memory_limit() > 1 << 20


@pytest.mark.parametrize(
    ("data", "tensor", "shown"),
    [
        (1, 1, []),
        (
            2,
            2,
            [
                "2 (data) x 2 (tensor) = 4 processes",
                "a process holds 50% of the model, 91 kB",
            ],
        ),
    ],
)
def test_dry_run_shows_what_processes_hold(workspace, capsys, data, tensor, shown):
    parallel = f"parallel={{data: {data}, tensor: {tensor}}}"
    command = ["recipe.yaml", "--dry-run", parallel, "stages=[{evaluate: }]"]
    assert main.train(command) == 0
    lines = capsys.readouterr().out.splitlines()
    topic = "parallel "
    assert [x[len(topic) :] for x in lines if x.startswith(topic)] == shown


@pytest.mark.parametrize("steps", [{"steps": 5}, {"epochs": 5}, {"epochs": 6}])
def test_dry_run_warns_of_many_epochs(workspace, capsys, steps):
    train = {"batch_size": 8, **steps}
    stages = f"stages=[{{train: {json.dumps(train)}}}]"
    assert main.train(["recipe.yaml", "--dry-run", stages]) == 0
    output = capsys.readouterr().out
    count = next(iter(steps.values()))
    assert f" for {count} steps, {count}.0 epochs\n" in output
    assert ("warning  " in output) == (count > 5)
