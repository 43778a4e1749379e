"""The examples of a run are tokenized once, and again after any change."""

import json
import shutil

import pytest
from lmx.data import token_store
from tiny_runs import TRAIN, Run

SHORT = TRAIN | {"steps": 2}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("LMX_CACHE", str(folder))
    return folder


@pytest.fixture
def encoded_counts(monkeypatch):
    """The number of examples in each block that is tokenized."""
    counts = []
    encode_block = token_store.encode_block

    def counting(block, *arguments, **settings):
        counts.append(len(block))
        return encode_block(block, *arguments, **settings)

    monkeypatch.setattr(token_store, "encode_block", counting)
    return counts


def log_lines(run, split="train"):
    return [line.split(" ", 2)[2] for line in run.log.splitlines() if split in line]


def test_examples_are_tokenized_once(tmp_path, base, encoded_counts):
    run = Run(tmp_path, {"train": SHORT}, model=base)
    with open(run.data["train"][0], "a") as stream:
        stream.write('{"text": "of another format"}\n')
    assert run() == 0
    assert encoded_counts == [40]
    first, outcome = log_lines(run), run.outcome()
    assert any("40 examples" in line and "tokenized into" in line for line in first)
    assert run("--restart") == 0
    assert encoded_counts == [40]
    assert run.outcome() == outcome
    second = log_lines(run)
    assert any(line.endswith("tokens, read from the cache") for line in second)
    # All other messages appear again, warnings about invalid examples included.
    assert any("example skipped" in line for line in second)
    messages = [x for x in first if x.startswith("train:") and " tokens," not in x]
    assert messages
    assert set(messages) < set(second)


def test_token_cache_is_invalidated(tmp_path, base, encoded_counts):
    model = shutil.copytree(base, tmp_path / "model")
    run = Run(tmp_path, {"train": TRAIN | {"steps": 1}}, model=model)
    assert run() == 0
    changed = {
        tmp_path / "train.jsonl": ("Add 1 ", "Sum 1 "),
        model / "tokenizer_config.json": ("if add_gen", "if  add_gen"),
    }
    for count, (path, texts) in enumerate(changed.items(), 2):
        path.write_text(path.read_text().replace(*texts))
        assert run("--restart") == 0
        assert encoded_counts == count * [40]
    settings = ("max_seq_length=65", "loss_on=all", "max_samples=40")
    for count, setting in enumerate(settings, 4):
        assert run("--restart", f"data.{setting}") == 0
        assert encoded_counts == count * [40]


def test_chats_that_become_several_sequences_are_reported(tmp_path, base, capsys):
    """The chat template drops earlier thinking. Dry run and training both report it."""
    model = shutil.copytree(base, tmp_path / "model")
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    content = "m.content if loop.last else m.content.split('</think>')[-1]"
    settings["chat_template"] = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{{{{ {content} }}}}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path.write_text(json.dumps(settings))
    run = Run(tmp_path, {"train": SHORT}, model=model)
    turns = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>two</think>2"},
    ]
    train_file = tmp_path / "train.jsonl"
    train_file.write_text((json.dumps({"messages": 2 * turns}) + "\n") * 8)
    assert run("--dry-run") == 0
    split = "8 chats became 16 sequences, because the chat template changes earlier"
    assert split in capsys.readouterr().out
    assert run() == 0
    assert log_lines(run, f"train: {split}")
    assert not [line for line in log_lines(run, "valid:") if "became" in line]


@pytest.mark.parametrize(
    "size",
    [{"batch_tokens": 300}, pytest.param({"batch_size": 2}, marks=pytest.mark.slow)],
)
def test_packed_sequences_train(tmp_path, base, size):
    """Packing trains the same tokens in fewer steps."""
    trained_tokens, steps = [], []
    for packing in (False, True):
        folder = tmp_path / str(packing)
        folder.mkdir()
        changes = {"steps": None, "epochs": 2, "batch_size": None, "packing": packing}
        run = Run(folder, {"train": TRAIN | changes | size}, model=base)
        run.data["max_seq_length"] = 128
        run.write()
        assert run() == 0
        last = [record for record in run.records() if record["kind"] == "train"][-1]
        trained_tokens.append(last["trained_tokens"])
        steps.append(last["step"])
    assert trained_tokens[0] == trained_tokens[1] > 0
    assert steps[1] < steps[0] / 2 or "batch_tokens" in size
    losses = [record["loss"] for record in run.records() if record["kind"] == "valid"]
    assert losses[-1] < losses[0]
    [line] = log_lines(run, "packed into")
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
