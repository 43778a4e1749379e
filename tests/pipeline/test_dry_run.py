"""`--dry-run` shows the model, the data and the cost, and refuses what does not fit;
`--find` searches the largest value that does."""

import json
from pathlib import Path

import lmx
import pytest
from lmx.cli import main
from lmx.data.dataset import RecordReader
from lmx.data.record_formats import DataRecord
from lmx.pipeline import dataset_checks, dry_run, resources
from lmx.run.fs import free_bytes
from sized_models import POSITIONS, write_rows, write_sized

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
LORA = "stages=[{train: {adapter: {rank: 4}, steps: 2, batch_size: 2}}]"
DRAFT = "stages=[{draft: {steps: 2, batch_tokens: 256, draft_model: {num_layers: 1}}}]"
LENGTH, BATCH = "data.max_seq_length", "stages.1.train.batch_size"
TOKENS = "stages.1.draft.batch_tokens"
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


def completions(*lengths: int) -> list[dict]:
    return [{"prompt": "count", "completion": "one two " * n} for n in lengths]


@pytest.mark.parametrize("count", [1, 5, 99, 10_000])
def test_reservoir_samples_every_nth_example(count, monkeypatch):
    monkeypatch.setattr(dry_run, "SAMPLE_CHARACTERS", 600)
    sample = dry_run.RowReservoir()
    for number in range(count):
        sample.add(DataRecord(str(number), text="x" * 10))
        assert len(sample.rows) <= 60
    positions = [int(record.where) for record in sample.rows]
    assert sample.total == count
    assert positions == list(range(0, count, positions[1] if count > 1 else 1))
    assert len(positions) >= min(count, 30)


def test_reservoir_takes_an_oversized_example():
    sample = dry_run.RowReservoir()
    sample.add(DataRecord("f:1", text="x" * (dry_run.SAMPLE_CHARACTERS + 1)))
    assert len(sample.rows) == 1


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (
            [],
            [
                "llama, 90,432 parameters, 181 kB, vocabulary 320",
                "13 of 15 layers are quantized",
                "its width 96 is not a multiple of 64: model.layers.0.mlp.down_proj",
                "rows.jsonl: 8 examples, format chat",
                "rows.jsonl:9: example skipped: ",
                "8 of 8 examples tokenized: 7 sequences of ",
                "1 truncated, 1 skipped",
                "skipped: rows.jsonl:8: ",
                "count to three<|im_end|>\n",
                "⟦one two three<|im_end|>⟧",
                "1-train: tiny, rows.jsonl -> exports/recipe/stages/1-train",
                " for 8 steps\n",
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
        ("memory", [DRAFT], f"{TOKENS}=128 or stages.1.draft.draft_model.num_layers=1"),
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


def find(key: str, *overrides: str) -> lmx.Check:
    return lmx.check("recipe.yaml", overrides=list(overrides), find=key)


def memory(*overrides: str) -> int:
    """The bytes that a run with these values checks before it starts."""
    recipe = lmx.Recipe("recipe.yaml", overrides=list(overrides))
    shape = resources.model_shape(recipe.loaded)
    check = resources.ResourceCheck(recipe.loaded, recipe.plan, shape)
    return max(stage.memory for stage in check.stages.values())


@pytest.mark.parametrize(
    ("key", "address", "stage", "least"),
    [
        ("max_seq_length", LENGTH, LORA, 64),
        ("batch_size", BATCH, LORA, 2),
        ("batch_tokens", TOKENS, DRAFT, 256),
    ],
)
def test_largest_value_fits_and_the_next_one_does_not(
    workspace, monkeypatch, capsys, key, address, stage, least
):
    write_rows(completions(*[300] * 64))
    limit_memory(monkeypatch, 20 * MEGABYTE / resources.USABLE)
    checked = find(key, stage)
    assert [*checked.largest] == [address]
    value = checked.largest[address]
    assert value > least
    sizes = [memory(stage, f"{address}={value + more}") for more in (0, 1)]
    assert sizes[0] <= 20 * MEGABYTE < sizes[1]
    assert f"{address}={value} is the largest" in str(checked)
    assert "more does not fit" in str(checked)
    # Stages and `fits` are those of the recipe with the value.
    assert checked.fits
    assert checked.memory == sizes[0]
    # A larger limit gives a larger value, also of a recipe that does not fit.
    limit_memory(monkeypatch, 25 * MEGABYTE / resources.USABLE)
    too_large = f"{address}={8 * value}"
    assert find(key, stage, too_large).largest[address] > value
    assert not (workspace / "exports").exists()


@pytest.mark.parametrize(
    ("rows", "key", "overrides", "largest", "reason"),
    [
        (
            [1],
            "max_seq_length",
            [],
            {LENGTH: POSITIONS},
            "the model has 1,000 position",
        ),
        ([1, 2, 300], "batch_size", [], {BATCH: 3}, "has all 3 training sequences"),
        ([1], "batch_size", ["data.train=a/b"], {BATCH: 4096}, "were not tried"),
        # A text is split into several sequences.
        (None, "batch_size", [], {BATCH: 4}, "has all 4 training sequences"),
    ],
)
def test_model_and_data_bound_the_value(
    workspace, monkeypatch, rows, key, overrides, largest, reason
):
    limit_memory(monkeypatch, 1 << 50)
    texts = [{"text": "one two " * 110}]
    write_rows(texts if rows is None else completions(*rows))
    checked = find(key, LORA, *overrides)
    assert checked.largest == largest
    assert reason in str(checked)


def test_every_stage_gets_its_own_batch_size(workspace, monkeypatch):
    """The recipe's sources are checked once, and not for each value that is tried."""
    sources = []

    def record(source, **settings):
        sources.append(source)
        return RecordReader(source, **settings)

    write_rows(completions(*[300] * 64))
    limit_memory(monkeypatch, 20 * MEGABYTE)
    monkeypatch.setattr(dataset_checks, "RecordReader", record)
    full = "{train: {steps: 2, batch_size: 2, gradient_checkpointing: true}}"
    lora = "{train: {steps: 2, batch_size: 2, adapter: {rank: 4}}}"
    checked = find("batch_size", f"stages=[{full}, {lora}]")
    first, second = (f"stages.{n}.train.batch_size" for n in (1, 2))
    assert [*checked.largest] == [first, second]
    assert checked.largest[first] != checked.largest[second]
    assert len(sources) == 1


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
        ([], "rank", 2, "find is one of max_seq_length"),
        ([], "max_seq_length", 3, f"of memory even with {LENGTH}=8, and 80% of the"),
    ],
)
def test_nothing_to_find(workspace, monkeypatch, capsys, overrides, key, code, message):
    limit_memory(monkeypatch, 1000)
    command = ["recipe.yaml", "--dry-run", "--find", key, *overrides]
    assert main.train(command) == code
    error = capsys.readouterr().err
    assert message in error
    if code == 3:
        assert "stages.1.train.gradient_checkpointing=true" in error
        assert f"{LENGTH}=" not in error.partition("hint")[2]


def test_find_needs_a_dry_run(workspace, capsys):
    assert main.train(["recipe.yaml", "--find", "batch_size"]) == 2
    assert "--find needs --dry-run" in capsys.readouterr().err
    assert not (workspace / "exports").exists()
    with pytest.raises(lmx.UserError, match="find: expected 'max_seq_length'"):
        lmx.check("recipe.yaml", find="rank")
