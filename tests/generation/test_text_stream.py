"""The text of completions, and stop strings with it split in every possible way."""

import json
import random
from itertools import combinations, pairwise

import pytest
from lmx.data.token_bytes import token_bytes
from lmx.generation.sequence import GenerationRequest, TokenOutput
from lmx.generation.text_stream import TextStream
from lmx.models.loader import load_tokenizer
from tiny_generators import byte_tokenizer, scripted
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


class Letters:
    """Stands in for a tokenizer: the text of a token is a part of a text."""

    def __init__(self, parts):
        self.parts, self.added_tokens_decoder = parts, {}

    def decode(self, tokens, **_):
        return "".join(self.parts[token] for token in tokens)


def text_stream(tokenizer, prompt=(), stop=()):
    return TextStream(tokenizer, GenerationRequest(prompt), stop)


def add(stream, token, *, last=False):
    return stream.add(TokenOutput(None, token, last)).text


def push_all(parts, stops):
    stream, out = text_stream(Letters(parts), stop=stops), ""
    for index in range(len(parts)):
        out += add(stream, index, last=index == len(parts) - 1)
        if stream.finish_reason:
            break
    return out, stream.finish_reason == "stop"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcabd", ["abd"], "abc"),
        ("aabaab!", ["aab!"], "aab"),
        ("no end", ["END"], "no end"),
        ("almost EN", ["END"], "almost EN"),
        ("x--y", ["--", "y"], "x"),
        ("later first", ["first", "ter"], "la"),
        ("né🎈b", ["🎈"], "né"),
    ],
)
def test_stop_string_is_found_across_chunks(text, stops, expected):
    positions = range(1, len(text))
    for count in range(len(text)):
        for cuts in combinations(positions, count):
            edges = [0, *cuts, len(text)]
            parts = [text[a:b] for a, b in pairwise(edges)]
            out, matched = push_all(parts, stops)
            assert (out, matched) == (expected, expected != text), parts


def test_the_beginning_of_a_stop_string_is_held_back():
    parts = ["xE", "N", "Ey", "EN", ""]
    stream = text_stream(Letters(parts), stop=["END"])
    texts = [add(stream, index, last=index == 4) for index in range(5)]
    assert texts == ["x", "", "ENEy", "", "EN"]
    assert stream.add(TokenOutput(None, 0, False)) is None


def test_completion_ends_before_stop_string():
    generator, prompt = scripted("abcdefgh", ids=[257])
    result = generator.generate(prompt, max_tokens=20, stop=["de", "zz"])
    assert (result.text, result.finish_reason) == ("abc", "stop")
    unstopped = generator.generate(prompt, max_tokens=20, stop=["hz"])
    assert unstopped.text == "abcdefgh"


WORDS = [
    *("The", "quick", "is", "the", "a", "é", "日本", "🎈🎈", "don't", "1,", "11", "."),
    *(
        "#tag",
        "x=y;",
        "(a",
        "b)",
        "[INST]",
        "ﬁ",
        "\u200b",
        "e\u0301",
        "\n\n",
        "  in",
        "\t",
    ),
]
SPACE = "\u2581"
SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


def sentencepiece(*, strip):
    """Llama's kind: a piece may begin with a space, other characters are bytes."""
    letters = "abcdefghijklmnopqrstuvwxyzTINS.,;=()[]#1'"
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *letters]
    merges = [(SPACE, "t"), ("t", "h"), ("th", "e"), (SPACE, "the"), ("i", "s")]
    merges += [(SPACE, "is"), (SPACE, SPACE), (SPACE, "T"), ("h", "e"), ("1", "1")]
    pieces += [a + b for a, b in merges]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    known = [(a, b) for a, b in merges if a in vocab and b in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, known, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme="first", split=False
    )
    chain = SENTENCEPIECE if strip else SENTENCEPIECE[:-1]
    content = json.loads(tokenizer.to_str())
    content["decoder"] = {"type": "Sequence", "decoders": chain}
    return Tokenizer.from_str(json.dumps(content))


def unigram():
    letters = {*"".join(WORDS), SPACE}
    scores = [("<unk>", 0.0), *((letter, -9.0) for letter in sorted(letters))]
    scores += [(SPACE + word, -3.0) for word in ("The", "is", "quick", "a")]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


TOKENIZERS = {
    "bytes": lambda: byte_tokenizer().backend_tokenizer,
    "sentencepiece": lambda: sentencepiece(strip=True),
    "sentencepiece, no strip": lambda: sentencepiece(strip=False),
    "unigram": unigram,
}


@pytest.fixture(params=list(TOKENIZERS), scope="module")
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = TOKENIZERS[request.param]()
    backend.add_special_tokens([AddedToken("[/INST]", special=True)])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=True
    ).save_pretrained(folder)
    return load_tokenizer(folder)


def streamed(tokenizer, prompt, tokens):
    stream, last = text_stream(tokenizer, prompt), len(tokens) - 1
    return [add(stream, t, last=n == last) for n, t in enumerate(tokens)]


def test_text_is_the_decoding_of_all_tokens_less_that_of_the_prompt(tokenizer):
    draw = random.Random(0)
    for _ in range(60):
        text = " ".join(draw.choices(WORDS, k=draw.randint(1, 30)))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        for cut in {0, len(tokens) - 1, *draw.choices(range(len(tokens)), k=6)}:
            prompt, rest = tokens[:cut], tokens[cut:]
            start = tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
            if not whole.startswith(start):
                continue  # the prompt ends inside a character
            parts = streamed(tokenizer, prompt, rest)
            assert start + "".join(parts) == whole
            assert not any("\ufffd" in part for part in parts)


def test_the_space_before_the_first_word_stays(tokenizer):
    prompt = tokenizer.encode("The quick", add_special_tokens=False)
    tokens = tokenizer.encode("The quick is the", add_special_tokens=False)
    rest = tokens[len(prompt) :]
    assert tokens[: len(prompt)] == prompt
    assert "".join(streamed(tokenizer, prompt, rest)) == " is the"
    # After a special token the words begin a text, as in a chat.
    end = tokenizer.convert_tokens_to_ids("[/INST]")
    alone = tokenizer.decode(rest, clean_up_tokenization_spaces=False)
    assert "".join(streamed(tokenizer, [*prompt, end], rest)) == alone


def test_a_single_token_has_its_space_and_its_bytes(tokenizer):
    for text in ("The quick is the", *WORDS, " ".join(WORDS)):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        raw = b"".join(token_bytes(tokenizer, token) for token in tokens)
        whole = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        # Decoders of SentencePiece take the space that was added before the text.
        assert raw.decode() in (whole, f" {whole}")
    end = tokenizer.convert_tokens_to_ids("[/INST]")
    assert token_bytes(tokenizer, end) == b"[/INST]"
    assert token_bytes(tokenizer, len(tokenizer) + 1) == b""


@pytest.mark.parametrize("name", ["bytes", "sentencepiece"])
def test_every_byte_has_a_token(name):
    backend = TOKENIZERS[name]()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    raw = {token_bytes(tokenizer, token) for token in range(len(tokenizer))}
    assert {bytes([value]) for value in range(256)} <= raw


def test_length_counts_complete_characters(tokenizer):
    for text in (" ".join(WORDS), "日本 é", '"é" 🎈'):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        stream = text_stream(tokenizer)
        for count, token in enumerate(tokens, 1):
            add(stream, token, last=count == len(tokens))
            text = tokenizer.decode(tokens[:count], clean_up_tokenization_spaces=False)
            assert stream.length == len(text.rstrip("\ufffd"))


def test_bytes_that_are_no_characters_are_given_in_time(tokenizer):
    """A model gone astray may repeat a byte for ever."""
    byte = tokenizer.convert_tokens_to_ids("<0xF0>")
    if byte is None:
        byte = tokenizer.encode("é", add_special_tokens=False)[-1]
    parts = streamed(tokenizer, [], [byte] * 200)
    text = tokenizer.decode([byte] * 200, clean_up_tokenization_spaces=False)
    assert "".join(parts) == text
    assert all(map("".join, zip(*[iter(parts)] * 66, strict=False)))


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", None])
def test_decoder_of_another_kind_in_the_file_is_not_used(name, tmp_path):
    """Some conversions write SentencePiece's for a byte-level vocabulary."""
    byte_tokenizer().save_pretrained(tmp_path)
    for file, key, value in (
        ("tokenizer.json", "decoder", {"type": "Sequence", "decoders": SENTENCEPIECE}),
        ("tokenizer_config.json", "tokenizer_class", name),
    ):
        content = json.loads((tmp_path / file).read_text()) | {key: value}
        (tmp_path / file).write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    tokens = tokenizer.encode("1, 11 é", add_special_tokens=False)
    assert tokenizer.decode(tokens) == "1, 11 é"
    assert "".join(streamed(tokenizer, [], tokens)) == "1, 11 é"
