"""Tokenizers that a GGUF file keeps: white space of added tokens, named templates."""

import json
import shutil

import gguf
import pytest
from lmx.convert.gguf import writer
from lmx.convert.importers import resolve_checkpoint
from lmx.errors import UserError
from lmx.models.loader import load, load_tokenizer
from test_gguf_export import write_sentencepiece
from tokenizers import AddedToken, Tokenizer

NAME = "general.name"
# Phi-3.5's, which take the white space after them.
TAKING = ("<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
TEXTS = (
    "<|user|>\nthe there<|end|>\n<|assistant|>\n",
    "<|system|> \t the<|end|>\n\n<|user|>here the</s> the <|assistant|>  ",
    "the <|endoftext|> the <|end|>\u00e9 <|endoftext|>\n<s> the <unk> the",
    "the<|user|>the <|userthe",
)


def added(text, *, special=True, **flags):
    return AddedToken(text, normalized=False, special=special, **flags)


@pytest.fixture
def make_model(make_checkpoint, tmp_path):
    """A function that writes a model with Llama's kind of tokenizer and more tokens."""

    def make(tokens=(), **settings):
        folder = shutil.copytree(make_checkpoint(), tmp_path / "model")
        for file in folder.glob("*token*"):
            file.unlink()
        write_sentencepiece(folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        for token in tokens:
            (
                tokenizer.add_special_tokens([token])
                if token.special
                else tokenizer.add_tokens([token])
            )
        tokenizer.save(str(folder / "tokenizer.json"))
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings |= {"bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
        return folder

    return make


def phi3_tokens():
    taking = [added(text, rstrip=True) for text in TAKING]
    # Of the tokenizer itself; flags of a token that is added again are the new ones.
    return [added("<|endoftext|>"), *taking, added("</s>", special=False, rstrip=True)]


def exported(folder, file, name="name"):
    """The metadata of the model's GGUF file."""
    writer.write(file, load(folder, compute="stored", lazy=True), name=name)
    fields = gguf.GGUFReader(file).fields
    return {key: field.contents() for key, field in fields.items()}


@pytest.mark.parametrize("name", ["name", "Phi-3.5-mini", "phi3"])
def test_tokens_that_take_white_space_have_the_same_ids(make_model, tmp_path, name):
    folder, file = make_model(phi3_tokens()), tmp_path / "file.gguf"
    metadata = exported(folder, file, name)
    # The name tells llama.cpp which tokens take it.
    assert metadata[NAME] == (f"{name}-phi3" if name == "name" else name)
    original, imported = (
        load_tokenizer(folder),
        load_tokenizer(resolve_checkpoint(file)),
    )
    for text in TEXTS:
        assert imported.encode(text) == original.encode(text), text
    # Negative control: the same file under another name.
    file.write_bytes(
        file.read_bytes().replace(b"hi-3", b"hi_3").replace(b"hi3", b"hi_")
    )
    other = load_tokenizer(resolve_checkpoint(file))
    assert other.encode(TEXTS[0]) != original.encode(TEXTS[0])


@pytest.mark.parametrize("name", ["my-Phi-3-teacher", "PHI3"])
def test_other_tokenizers_are_not_named_as_phi3(make_model, tmp_path, name):
    folder, file = make_model([added("<|endoftext|>")]), tmp_path / "file.gguf"
    metadata = exported(folder, file, name)
    assert metadata[NAME] == {"PHI3": "phi_3"}.get(name, "my-phi_3-teacher")
    text = "the <|endoftext|>\n the</s> the"
    imported = load_tokenizer(resolve_checkpoint(file))
    assert imported.encode(text) == load_tokenizer(folder).encode(text)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            [added("<mask>", lstrip=True)],
            "llama.cpp does not read rstrip, .* of '<mask>'",
        ),
        ([added("<word>", single_word=True)], "single_word of '<word>'"),
        ([added("<end>", rstrip=True)], "of '<end>'"),
        ([*phi3_tokens(), added("<pad>")], "of '<pad>'"),
        ([*phi3_tokens(), added("<s>", rstrip=True)], "of '<s>'"),
    ],
)
def test_white_space_that_llama_cpp_does_not_take(
    make_model, tmp_path, tokens, message
):
    with pytest.raises(UserError, match=f"cannot hold this tokenizer: .*{message}"):
        exported(make_model(tokens), tmp_path / "file.gguf", "Phi-3")


TEMPLATES = {
    "default": "{{ messages[0].content }}",
    "rag": "{{ documents }}",
    "tool-use": "{{ tools }}",
}


@pytest.mark.parametrize("names", [["default"], [*TEMPLATES], ["default", "rag"]])
def test_named_templates_are_kept(make_model, tmp_path, names):
    listed = [{"name": name, "template": TEMPLATES[name]} for name in names]
    folder, file = make_model(chat_template=listed), tmp_path / "file.gguf"
    metadata = exported(folder, file)
    reference = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    reference.add_chat_template(listed)
    expected = {k: v.value for k, v in reference.kv_data[0].items() if "template" in k}
    found = {key: value for key, value in metadata.items() if "template" in key}
    key = "tokenizer.chat_templates"
    assert sorted(found.pop(key, [])) == sorted(expected.pop(key, []))
    assert found == expected
    imported = load_tokenizer(resolve_checkpoint(file)).chat_template
    named = {name.replace("-", "_"): TEMPLATES[name] for name in names}
    assert imported == (named if len(named) > 1 else TEMPLATES["default"])
