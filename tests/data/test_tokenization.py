"""Tokens and masks of every kind of row, checked token by token."""

from itertools import pairwise

import numpy as np
import pytest
from lmx.data import tokenization
from lmx.data.record_formats import DataRecord
from lmx.errors import UserError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As reasoning models do: thinking stays in the last turn only.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = FORGETFUL.replace(
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}",
)
# Counts the messages at its head, so that no shorter chat is a prefix.
REWRITING = "{{ messages | length }} messages\n" + CHATML
WITH_BOS = "<s>" + CHATML
# No special token stands between what is asked and what is answered.
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
THINKING = "<think>two</think>2"


def build(chat_template, *, bos=False):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant system thinking hello"] * 9, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 3)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        bos_token="<s>" if bos else None,
        chat_template=chat_template,
    )


@pytest.fixture(scope="module")
def chatml():
    return build(CHATML)


def chat(*contents, system=None):
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    if system:
        turns.insert(0, {"role": "system", "content": system})
    return DataRecord("f:1", messages=tuple(turns))


def one(row, tokenizer, **options):
    [example] = tokenization.encode(
        row, tokenizer, **{"max_seq_length": 512, **options}
    )
    assert example.tokens.dtype == np.int32
    assert example.tokens.shape == example.mask.shape
    assert not example.mask[0]
    return example


def trained(example, tokenizer):
    return [text for text, on in tokenization.render_mask(example, tokenizer) if on]


def test_all_assistant_turns_are_trained_with_end_of_turn(chatml):
    row = chat("1+1?", "2", "2+2?", "4\n\n4", system="Add.")
    example = one(row, chatml)
    whole = chatml.apply_chat_template(list(row.messages), tokenize=False)
    ids = chatml.encode(whole, add_special_tokens=False)
    assert example.tokens.tolist() == ids
    expected, part, role = [], "between", ""
    for text in chatml.convert_ids_to_tokens(ids):
        expected.append(part == "content" and role == "assistant")
        if text == "<|im_start|>":
            part, role = "header", ""
        elif part == "header" and text != "Ċ":
            role += text
        elif part == "header":
            part = "content"
        elif text == "<|im_end|>":
            part = "between"
    assert example.mask.tolist() == expected
    assert trained(example, chatml) == ["2<|im_end|>", "4\n\n4<|im_end|>"]
    shown = tokenization.render_mask(example, chatml)
    assert "".join(text for text, _ in shown) == whole


def test_loss_on_all_trains_all_tokens(chatml):
    example = one(chat("1+1?", "2"), chatml, loss_on="all")
    assert example.mask.tolist() == [False] + [True] * (len(example.tokens) - 1)


def test_loss_on_all_keeps_the_last_user_turn():
    tokenizer = build(REWRITING)
    row = chat("a?", "A", "b?")
    example = one(row, tokenizer, loss_on="all")
    whole = tokenizer.apply_chat_template(list(row.messages), tokenize=False)
    assert example.mask[1:].all()
    assert tokenizer.decode(example.tokens) == whole


def test_trailing_user_turns_and_empty_replies_are_not_trained(chatml):
    example = one(chat("a?", "", "b?", "B", "c?"), chatml)
    assert trained(example, chatml) == ["B<|im_end|>"]
    assert "c?" not in chatml.decode(example.tokens)


def test_template_that_drops_reasoning_trains_the_last_turn():
    tokenizer = build(FORGETFUL)
    row = chat("1+1?", THINKING, "again?", THINKING)
    encoded = tokenization.encode_all([row], tokenizer, max_seq_length=512)
    assert trained(encoded.examples[0], tokenizer) == [THINKING + "<|im_end|>"]
    assert encoded.last_only == 1
    # Without thinking nothing is dropped, and every turn is trained.
    encoded = tokenization.encode_all(
        [chat("a?", "A", "b?", "B")], tokenizer, max_seq_length=99
    )
    assert trained(encoded.examples[0], tokenizer) == ["A<|im_end|>", "B<|im_end|>"]
    assert encoded.last_only == 0


def test_generation_markers_of_the_template_are_used():
    tokenizer = build(MARKED)
    row = chat("1+1?", THINKING, "again?", THINKING)
    example = one(row, tokenizer)
    assert trained(example, tokenizer) == ["2<|im_end|>", THINKING + "<|im_end|>"]
    whole = tokenizer.apply_chat_template(list(row.messages), tokenize=False)
    assert tokenizer.decode(example.tokens) == whole


def test_template_that_changes_earlier_turns_is_refused():
    with pytest.raises(UserError, match=r"nothing to train.*changes the turns before"):
        tokenization.encode_all([chat("a", "b")], build(REWRITING), max_seq_length=99)


def test_template_error_skips_the_record():
    tokenizer = build("{{ raise_exception('no system turns') }}")
    with pytest.raises(UserError, match="the chat template rejects it: no system"):
        tokenization.encode_all([chat("a", "b")], tokenizer, max_seq_length=99)


def test_token_across_the_boundary_is_split():
    tokenizer = build(PLAIN)
    asked, whole = "user: go\nassistant: ", "user: go\nassistant: thinking\n"
    prompt = tokenizer.encode(asked, add_special_tokens=False)
    joined = tokenizer.encode(whole, add_special_tokens=False)
    assert joined[: len(prompt)] != prompt
    example = one(chat("go", "thinking"), tokenizer)
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert not example.mask[: len(prompt)].any()
    assert example.mask[len(prompt) :].all()
    assert tokenizer.decode(example.tokens) == whole


def test_completion_that_merges_with_the_prompt():
    tokenizer = build(None)
    row = DataRecord("f:1", prompt="use", completion="r")
    joined = tokenizer.encode("user", add_special_tokens=False)
    prompt = tokenizer.encode("use", add_special_tokens=False)
    assert joined[: len(prompt)] != prompt
    example = one(row, tokenizer)
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert trained(example, tokenizer) == ["r<|im_end|>"]


def test_bos_is_added_once():
    tokenizer = build(WITH_BOS, bos=True)
    bos = tokenizer.bos_token_id
    for row in (
        chat("a", "b"),
        DataRecord("f:1", text="hello"),
        DataRecord("f:1", text="<s>hello"),
        DataRecord("f:1", prompt="hello", completion=" user"),
    ):
        tokens = one(row, tokenizer).tokens.tolist()
        assert (tokens[0], tokens.count(bos)) == (bos, 1)
    tokenizer.chat_template = None
    tokens = one(
        DataRecord("f:1", prompt="a", completion="b"), tokenizer
    ).tokens.tolist()
    assert (tokens[0], tokens.count(bos)) == (bos, 1)


def test_prompt_and_completion_use_the_chat_template(chatml):
    row = DataRecord("f:1", prompt="1+1?", completion="2", skill="addition")
    example = one(row, chatml)
    assert example.tokens.tolist() == one(chat("1+1?", "2"), chatml).tokens.tolist()
    assert (example.where, example.skill) == ("f:1", "addition")
    bare = build(None)
    example = one(row, bare)
    assert tokenization.render_mask(example, bare) == [
        ("1+1?", False),
        ("2<|im_end|>", True),
    ]


@pytest.mark.parametrize("count", [2, 8, 9, 15, 16, 40])
def test_windows_train_every_token_but_the_first_once(chatml, count):
    tokens = chatml.encode("z" * (count - 1), add_special_tokens=False)
    tokens.append(chatml.eos_token_id)
    row = DataRecord("f:1", text="z" * (count - 1))
    windows = tokenization.encode(row, chatml, max_seq_length=8)
    assert all(2 <= len(w.tokens) <= 8 for w in windows)
    learned = [t for w in windows for t, on in zip(w.tokens, w.mask, strict=True) if on]
    assert learned == tokens[1:]
    for before, after in pairwise(windows):
        assert before.tokens[-1] == after.tokens[0]


def test_end_token_inside_text_does_not_end_the_mask(chatml):
    example = one(DataRecord("f:1", text="a<|im_end|>b"), chatml)
    assert example.mask.tolist() == [False, True, True, True]


def test_long_records_are_truncated_or_dropped(chatml):
    rows = [chat("a", "b" * 40), chat("a" * 40, "b"), chat("a", "b")]
    encoded = tokenization.encode_all(rows, chatml, max_seq_length=30)
    assert [len(e.tokens) for e in encoded.examples] == [30, 13]
    assert encoded.truncated == 1
    [(where, reason)] = encoded.dropped
    assert where == "f:1"
    assert reason.startswith("the prompt alone has 4")
    with pytest.raises(UserError, match="nothing to train on: all 1 examples") as fault:
        tokenization.encode_all(rows[1:2], chatml, max_seq_length=30)
    assert fault.value.hint == "raise data.max_seq_length"


def test_chats_need_a_chat_template():
    with pytest.raises(UserError, match="chat examples need a chat template"):
        tokenization.encode(chat("a", "b"), build(None), max_seq_length=99)


def test_empty_dataset_is_refused(chatml):
    with pytest.raises(UserError, match="nothing to train on"):
        tokenization.encode_all([], chatml, max_seq_length=99)


def test_tokenizer_truncation_is_disabled(chatml):
    row = chat("a", "b" * 40)
    whole = one(row, chatml).tokens.tolist()
    chatml.backend_tokenizer.enable_truncation(8)
    chatml.backend_tokenizer.enable_padding(length=99)
    assert one(row, chatml).tokens.tolist() == whole


def test_slow_tokenizer_and_mlx_lm_wrapper(chatml):
    utils = pytest.importorskip("mlx_lm.tokenizer_utils")

    class Slow:
        chat_template = CHATML
        bos_token_id, eos_token_id = None, chatml.eos_token_id
        encode, decode = chatml.encode, chatml.decode
        apply_chat_template = chatml.apply_chat_template

    rows = [chat("a?", "A", "b?", "B"), DataRecord("f:2", text="hello user")]
    expected = tokenization.encode_all(rows, chatml, max_seq_length=99).examples
    for other in (Slow(), utils.TokenizerWrapper(chatml)):
        found = tokenization.encode_all(rows, other, max_seq_length=99).examples
        for ours, theirs in zip(expected, found, strict=True):
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            assert ours.mask.tolist() == theirs.mask.tolist()
    wrapped = utils.TokenizerWrapper(build(MARKED))
    example = one(chat("1+1?", THINKING, "again?", THINKING), wrapped)
    assert trained(example, wrapped) == ["2<|im_end|>", THINKING + "<|im_end|>"]
