"""Tokens that the model has no row for are refused wherever text becomes tokens."""

import json
import shutil

import pytest
import yaml
from lmx.cli import main
from lmx.data.record_formats import DataRecord
from lmx.data.tokenization import encode_all
from lmx.errors import UserError
from lmx.generation.generator import Generator
from lmx.models.loader import load

EXTRA = "<extra>"


@pytest.fixture
def folder(make_checkpoint, tmp_path):
    """A model of 320 tokens, whose tokenizer has one more."""
    folder = shutil.copytree(make_checkpoint(dtype="float32"), tmp_path / "model")
    edit(folder / "tokenizer.json", lambda value: value["added_tokens"].append(added()))
    return folder


def added(index=320):
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return {"id": index, "content": EXTRA, "special": True} | dict.fromkeys(
        flags, False
    )


def edit(file, change):
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def test_text_with_such_a_token_is_refused(folder):
    loaded = load(folder)
    generator = Generator(loaded.model, loaded.tokenizer)
    expected = f"'{EXTRA}' has the id 320, but the model has only the ids 0 to 319"
    for text_to_tokens in (
        loaded.tokenizer.encode,
        generator.encode_text,
        generator.encode_chat,
        lambda text: generator.encode_chat([{"role": "user", "content": text}]),
        lambda text: encode_all(
            [DataRecord("rows", prompt="one", completion=text)],
            loaded.tokenizer,
            max_seq_length=64,
        ),
    ):
        assert text_to_tokens("one two")
        with pytest.raises(UserError, match=expected):
            text_to_tokens(f"one {EXTRA} two")


@pytest.mark.parametrize("ids", [[5, 320], [2**31], [5, -1]])
def test_a_prompt_of_such_ids_is_refused(folder, ids):
    loaded = load(folder)
    generator = Generator(loaded.model, loaded.tokenizer)
    with pytest.raises(UserError, match="the model has only the ids 0 to 319"):
        generator.generate(ids, max_tokens=1)
    assert generator.generate([5, 319], max_tokens=1).tokens


def test_an_end_token_of_this_kind_is_refused(folder):
    edit(folder / "tokenizer_config.json", lambda v: v.update(eos_token=EXTRA))
    with pytest.raises(UserError, match=f"token '{EXTRA}' has the id 320"):
        load(folder)


def test_commands_name_the_token(folder, tmp_path, capfd):
    options = ["--prompt", f"one {EXTRA}", "--max-tokens", "1"]
    assert main.main(["generate", str(folder), *options]) == 2
    assert EXTRA in capfd.readouterr().err
    row = {"prompt": "one", "completion": f"two {EXTRA}"}
    (tmp_path / "rows.jsonl").write_text(4 * (json.dumps(row) + "\n"))
    recipe = {
        "model": str(folder),
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_seq_length": 32},
        "stages": [{"train": {"steps": 1, "batch_size": 2}}],
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    for options in (["--dry-run"], [f"output={tmp_path / 'out'}", "--quiet"]):
        assert main.train([str(tmp_path / "r.yaml"), *options]) in (1, 2)
        assert EXTRA in capfd.readouterr().err
