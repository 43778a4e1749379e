"""`--dry-run --find`: the largest value that fits, its bounds, and its errors."""

import json
from pathlib import Path

import lmx
import pytest
from lmx.cli import main
from lmx.config.model import ScratchModelConfig
from lmx.data.dataset import RecordReader
from lmx.data.tokenization import encode_all
from lmx.models import checkpoint_writer, from_scratch, loader
from lmx.pipeline import dataset_checks, dry_run, resources
from lmx.pipeline.train import largest_fit

LENGTH, BATCH = "data.max_seq_length", "stages.1.train.batch_size"
POSITIONS = 1000
RECIPE = """\
model: tiny
data: {train: rows.jsonl, max_seq_length: 64}
stages:
  - train: {adapter: {rank: 4}, steps: 2, batch_size: 2}
  - export:
"""
DRAFT = "stages=[{draft: {steps: 2, batch_tokens: 256}}]"
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = folder.parent / "tokenizer"
    for path in (folder, tokenizer):
        path.mkdir()
    from_scratch.train_tokenizer(["count to three, one two three"] * 3, 320, tokenizer)
    shape = ScratchModelConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        max_position_embeddings=POSITIONS,
    )
    config = from_scratch.llama_config(shape)
    weights = from_scratch.initial_weights(config, 0)
    checkpoint_writer.write_checkpoint(folder, weights, config, companions=tokenizer)
    return folder


@pytest.fixture
def workspace(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(model)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    write_rows(tmp_path, [1, 2, 300])
    return tmp_path


def write_rows(folder, lengths):
    rows = [{"prompt": "count", "completion": "one two " * n} for n in lengths]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text)


def set_limit(monkeypatch, size):
    """Let the estimate reach so many bytes."""
    limit = size / largest_fit.USABLE
    monkeypatch.setattr(resources, "memory_limit", lambda: round(limit))


def find(key, *overrides):
    return lmx.check("recipe.yaml", overrides=list(overrides), find=key)


def memory(overrides):
    """The bytes that a run with these values checks before it starts."""
    recipe = lmx.Recipe("recipe.yaml", overrides=overrides)
    shape = resources.model_shape(recipe.loaded)
    check = resources.ResourceCheck(recipe.loaded, recipe.plan, shape, [], 1.0)
    return max(map(check.memory, check.stages))


@pytest.mark.parametrize(
    ("key", "address"), [("max_seq_length", LENGTH), ("batch_size", BATCH)]
)
def test_largest_value_runs_and_the_next_one_does_not(
    workspace, monkeypatch, key, address
):
    write_rows(workspace, [300] * 64)
    set_limit(monkeypatch, 20 * MEGABYTE)
    checked = find(key)
    assert [*checked.largest] == [address]
    value = checked.largest[address]
    assert value > 64 if key == "max_seq_length" else value > 2
    assert memory({address: value}) <= 20 * MEGABYTE < memory({address: value + 1})
    # A larger limit gives a larger value.
    set_limit(monkeypatch, 25 * MEGABYTE)
    assert find(key).largest[address] > value
    # Stages and `fits` are those of the recipe with the value.
    assert checked.fits
    assert checked.memory <= 20 * MEGABYTE


def test_a_recipe_that_does_not_fit_gets_a_value_that_does(
    workspace, monkeypatch, capsys
):
    set_limit(monkeypatch, 8 * MEGABYTE)
    too_long = f"{LENGTH}=900"
    assert main.train(["recipe.yaml", "--dry-run", too_long]) == 3
    command = ["recipe.yaml", "--dry-run", too_long, "--find", "max_seq_length"]
    capsys.readouterr()
    assert main.train(command) == 0
    output = capsys.readouterr().out
    value = find("max_seq_length").largest[LENGTH]
    assert f"largest: {value:,}; more does not fit" in output
    assert f"`max_seq_length: {value}`; or: {LENGTH}={value}\n" in output
    rows = [
        line.split() for line in output.splitlines() if line.endswith(("yes", "no"))
    ]
    assert {row[-1] for row in rows} == {"yes", "no"}
    assert [f"{value:,}", "yes"] in [[row[0], row[-1]] for row in rows]
    assert not (workspace / "exports").exists()


def test_longest_example_bounds_the_length(workspace):
    write_rows(workspace, [1, 2, 50])
    checked = find("max_seq_length")
    assert "a larger value changes nothing" in str(checked)
    longest = checked.largest[LENGTH]
    assert truncated(longest) == 0
    assert truncated(longest - 1) == 1


def truncated(length):
    """Number of examples that max_seq_length cuts off."""
    rows = list(RecordReader("rows.jsonl", split="train", find=Path))
    tokenizer = loader.load(Path("tiny"), lazy=True).tokenizer
    return encode_all(rows, tokenizer, max_seq_length=length).truncated


def test_longest_rejected_completion_bounds_the_length(workspace):
    row = {"prompt": "count", "chosen": "one", "rejected": "one two " * 40}
    (workspace / "rows.jsonl").write_text(json.dumps(row) + "\n")
    settings = "stages.train.loss={type: dpo}"
    assert find("max_seq_length", settings).largest[LENGTH] > 80


def test_longest_example_is_tokenized_also_if_it_is_not_sampled(workspace, monkeypatch):
    write_rows(workspace, [1, 1, 1, 50, 1, 1, 1, 1])
    every = find("max_seq_length").largest
    monkeypatch.setattr(dry_run, "SAMPLE_CHARACTERS", 60)
    checked = find("max_seq_length")
    assert " of 8 examples tokenized" in str(checked)
    assert "8 of 8" not in str(checked)
    assert "changes little" in str(checked)
    assert checked.largest == every


def test_trials_do_not_read_the_data(workspace, monkeypatch):
    """The recipe's sources are checked once, and not for each value that is tried."""
    sources = []

    def record(source, **settings):
        sources.append(source)
        return RecordReader(source, **settings)

    monkeypatch.setattr(dataset_checks, "RecordReader", record)
    assert find("max_seq_length")
    # Negative control: the check does read it.
    assert len(sources) == 1


def test_longest_text_bounds_the_length(workspace):
    row = {"text": "one two " * 100}
    (workspace / "rows.jsonl").write_text(json.dumps(row) + "\n")
    # Windows of 64 tokens do not tell how long the text is.
    assert find("max_seq_length").largest[LENGTH] >= 200


@pytest.mark.parametrize("override", ["data.train=a/b", "stages.train.packing=true"])
def test_positions_of_the_model_bound_the_length(workspace, override):
    checked = find("max_seq_length", override)
    assert checked.largest == {LENGTH: POSITIONS}
    assert "the model has 1,000 positions" in str(checked)


def test_number_of_sequences_bounds_the_batch(workspace):
    checked = find("batch_size")
    assert checked.largest == {BATCH: 3}
    assert "one batch then has all 3 training sequences" in str(checked)
    # A text is split into several sequences.
    (workspace / "rows.jsonl").write_text(json.dumps({"text": "one two " * 100}))
    assert find("batch_size").largest[BATCH] >= 4


def test_every_stage_gets_its_own_batch_size(workspace, monkeypatch):
    write_rows(workspace, [300] * 64)
    set_limit(monkeypatch, 20 * MEGABYTE)
    full = "{train: {steps: 2, batch_size: 2, gradient_checkpointing: true}}"
    lora = "{train: {steps: 2, batch_size: 2, adapter: {rank: 4}}}"
    checked = find("batch_size", f"stages=[{full}, {lora}]")
    first, second = (f"stages.{n}.train.batch_size" for n in (1, 2))
    assert [*checked.largest] == [first, second]
    assert checked.largest[first] != checked.largest[second]


def test_batch_tokens_of_a_draft_stage(workspace, monkeypatch):
    write_rows(workspace, [300] * 64)
    set_limit(monkeypatch, 30 * MEGABYTE)
    checked = find("batch_tokens", DRAFT)
    [value] = checked.largest.values()
    assert value > 256
    address = "stages.1.draft.batch_tokens"
    sizes = [memory([DRAFT, f"{address}={value + more}"]) for more in (0, 1)]
    assert sizes[0] <= 30 * MEGABYTE < sizes[1]


@pytest.mark.parametrize(
    ("overrides", "key", "code", "message"),
    [
        (
            ["stages=[{quantize: {bits: 4}}]"],
            "batch_size",
            2,
            "no stage of this recipe",
        ),
        ([], "batch_tokens", 2, "--find batch_size"),
        ([DRAFT], "batch_size", 2, "--find batch_tokens"),
        (["model=org/model"], "batch_size", 2, "which is unknown"),
    ],
)
def test_nothing_to_find(workspace, capsys, overrides, key, code, message):
    command = ["recipe.yaml", "--dry-run", "--find", key, *overrides]
    assert main.train(command) == code
    assert message in capsys.readouterr().err


def test_smallest_value_that_does_not_fit_exits_3(workspace, capsys, monkeypatch):
    set_limit(monkeypatch, 1000)
    command = ["recipe.yaml", "--dry-run", "--find", "max_seq_length"]
    assert main.train(command) == 3
    error = capsys.readouterr().err
    assert f"of memory even with {LENGTH}=8, and 80% of the limit are 1 kB" in error
    assert "stages.1.train.gradient_checkpointing=true" in error
    assert f"{LENGTH}=" not in error.partition("hint")[2]


def test_find_needs_a_dry_run(workspace, capsys):
    assert main.train(["recipe.yaml", "--find", "batch_size"]) == 2
    assert "--find needs --dry-run" in capsys.readouterr().err
    assert not (workspace / "exports").exists()
    assert main.train(["recipe.yaml", "--dry-run", "--find", "rank"]) == 2
    assert "find is one of max_seq_length" in capsys.readouterr().err
    with pytest.raises(lmx.UserError, match="find: expected 'max_seq_length'"):
        lmx.check("recipe.yaml", find="rank")
