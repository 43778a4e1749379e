"""What a run does with its rows: tokenized once, again when anything changed."""

import json

import pytest
from lmx.data import token_store
from lmx.data.tokenization import LAST_ONLY
from tiny_runs import TRAIN, Run, write_rows

SHORT = TRAIN | {"steps": 2}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("LMX_CACHE", str(folder))
    return folder


@pytest.fixture
def encoded(monkeypatch):
    """How many rows were encoded block by block, as training rows are."""
    counts = []
    real = token_store.encode_block

    def counting(block, *arguments, **settings):
        counts.append(len(block))
        return real(block, *arguments, **settings)

    monkeypatch.setattr(token_store, "encode_block", counting)
    return counts


def lines_of(run, split="train"):
    return [line.split(" ", 2)[2] for line in run.log.splitlines() if split in line]


def test_examples_are_tokenized_once(tmp_path, base, encoded):
    run = Run(tmp_path, {"train": SHORT}, model=base)
    with open(run.data["train"][0], "a") as stream:
        stream.write('{"text": "of another format"}\n')
    assert run() == 0
    assert encoded == [40]
    first, outcome = lines_of(run), run.outcome()
    assert any("40 examples" in line and "tokenized into" in line for line in first)
    assert run("--restart") == 0
    assert encoded == [40]
    assert run.outcome() == outcome
    second = lines_of(run)
    assert any(line.endswith("tokens, read from the cache") for line in second)
    # All else is said again, warnings of bad rows included.
    assert any("example skipped" in line for line in second)
    told = [x for x in first if x.startswith("train:") and " tokens," not in x]
    assert told
    assert set(told) < set(second)


@pytest.mark.parametrize(
    "change", ["content", "max_seq_length", "loss_on", "max_samples", "template"]
)
def test_token_cache_is_invalidated(tmp_path, base, make_copy, encoded, change):
    model = make_copy(base)
    run = Run(tmp_path, {"train": SHORT}, model=model)
    assert run() == 0
    if change == "content":
        path = tmp_path / "train.jsonl"
        path.write_text(path.read_text().replace("Add 1 ", "Sum 1 "))
    elif change == "template":
        path = model / "tokenizer_config.json"
        path.write_text(path.read_text().replace("if add_gen", "if  add_gen"))
    else:
        values = {"max_seq_length": 65, "loss_on": "all", "max_samples": 40}
        run.data[change] = values[change]
        run.write()
    assert run("--restart") == 0
    assert encoded == [40, 40]


@pytest.fixture
def make_copy(tmp_path):
    def copy(folder):
        target = tmp_path / "model"
        target.mkdir()
        for file in folder.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        return target

    return copy


def test_completions_dropped_by_the_template_are_reported(
    tmp_path, base, make_copy, capsys
):
    """Of a template that drops earlier thinking; beforehand, and when it trains."""
    model = make_copy(base)
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    thinks = "m.content if loop.last else m.content.split('</think>')[-1]"
    settings["chat_template"] = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{{{{ {thinks} }}}}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path.write_text(json.dumps(settings))
    run = Run(tmp_path, {"train": SHORT}, model=model)
    thinking = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>two</think>2"},
    ]
    rows = tmp_path / "train.jsonl"
    rows.write_text((json.dumps({"messages": 2 * thinking}) + "\n") * 8)
    assert run("--dry-run") == 0
    assert f"8 {LAST_ONLY}" in capsys.readouterr().out
    assert run() == 0
    assert lines_of(run, f"train: 8 {LAST_ONLY}")
    assert not [line for line in lines_of(run, "valid:") if LAST_ONLY in line]


def test_changed_data_is_refused_on_resume(tmp_path, base, capsys):
    run = Run(tmp_path, {"train": SHORT | {"steps": 5}}, model=base)
    assert run.attacked("SIGKILL", "step", 5).returncode == -9
    write_rows(tmp_path / "train.jsonl", 1, 40)
    assert run() != 0
    assert "examples have changed" in capsys.readouterr().err


def test_run_holds_out_examples(tmp_path, base, encoded):
    run = Run(tmp_path, {"train": SHORT}, model=base)
    write_rows(tmp_path / "train.jsonl", 0, 100)
    del run.data["valid"]
    run.write()
    assert run() == 0
    [line] = [line for line in lines_of(run, "held out from")]
    held = int(line.split()[1])
    assert encoded == [100 - held]
    assert run("--restart") == 0
    assert encoded == [100 - held]


@pytest.mark.parametrize("size", [{"batch_size": 2}, {"batch_tokens": 300}])
def test_packed_sequences_train(tmp_path, base, size):
    """The same tokens in fewer batches, and the loss falls."""
    trained, steps = [], []
    for packing in (False, True):
        folder = tmp_path / str(packing)
        folder.mkdir()
        changes = {"steps": None, "epochs": 2, "batch_size": None, "packing": packing}
        run = Run(folder, {"train": TRAIN | changes | size}, model=base)
        run.data["max_seq_length"] = 128
        run.write()
        assert run() == 0
        last = [row for row in run.rows() if row["kind"] == "train"][-1]
        trained.append(last["trained_tokens"])
        steps.append(last["step"])
    assert trained[0] == trained[1] > 0
    assert steps[1] < steps[0] / 2 or "batch_tokens" in size
    losses = [row["loss"] for row in run.rows() if row["kind"] == "valid"]
    assert losses[-1] < losses[0]
    [line] = lines_of(run, "packed into")
    assert "40 examples packed into" in line


def test_unsupported_packing_pads_with_a_warning(tmp_path, make_checkpoint):
    sizes = {"n_ctx": 128, "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 128}
    gpt2 = {"model_type": "gpt2", "layer_norm_epsilon": 1e-5, "vocab_size": 320}
    model = make_checkpoint(gpt2 | sizes | {"eos_token_id": [2, 0]}, dtype="float32")
    run = Run(tmp_path, {"train": SHORT | {"packing": True}}, model=model)
    run.data["max_seq_length"] = 100
    run.write()
    assert run() == 0
    assert "packing is off and sequences are padded" in run.log
    assert "packed into" not in run.log
