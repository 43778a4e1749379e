"""Tokens and loss masks of every record format, checked token by token."""

from itertools import pairwise

import numpy as np
import pytest
from lmx.data import tokenization
from lmx.data.record_formats import DataRecord
from lmx.errors import UserError
from reading import encode
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning models keep the thinking of the last turn only.
DROPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION_MARKERS = DROPS_REASONING.replace(
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}",
)
# Qwen3: the last turn gets an empty thinking block if it has no other.
INSERTS_THINKING = CHATML.replace(
    "{{ m.content }}",
    "{% if loop.last and m.role == 'assistant' and '<think>' not in m.content %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
)
# GLM-4.5: each turn without thinking gets a block on a line of its own.
INSERTS_THINKING_LINES = CHATML.replace("assistant\n", "assistant").replace(
    "{{ m.role }}\n{{ m.content }}",
    "{{ m.role }}{{ '\n<think></think>' if m.role == 'assistant' "
    "and '<think>' not in m.content }}\n{{ m.content }}",
)
# The header counts the messages, so a shorter chat is never a prefix.
CHANGES_HISTORY = "{{ messages | length }} messages\n" + CHATML
WITH_BOS = "<s>" + CHATML
# No special token separates the prompt from the completion.
NO_MARKERS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
THINKING = "<think>two</think>2"


def build_tokenizer(chat_template, *, bos=False):
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
    return build_tokenizer(CHATML)


def chat(*contents, system=None):
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    if system:
        turns.insert(0, {"role": "system", "content": system})
    return DataRecord("f:1", messages=tuple(turns))


def encode_one(record, tokenizer, **options):
    [example] = encode(record, tokenizer, **{"max_seq_length": 512, **options})
    assert example.tokens.dtype == np.int32
    assert example.tokens.shape == example.mask.shape
    assert not example.mask[0]
    return example


def trained_texts(example, tokenizer):
    return [
        text
        for text, is_trained in tokenization.render_mask(example, tokenizer)
        if is_trained
    ]


def test_all_assistant_turns_are_trained_with_end_of_turn(chatml):
    record = chat("1+1?", "2", "2+2?", "4\n\n4", system="Add.")
    example = encode_one(record, chatml)
    full_text = chatml.apply_chat_template(list(record.messages), tokenize=False)
    ids = chatml.encode(full_text, add_special_tokens=False)
    assert example.tokens.tolist() == ids
    expected, section, role = [], "between", ""
    for text in chatml.convert_ids_to_tokens(ids):
        expected.append(section == "content" and role == "assistant")
        if text == "<|im_start|>":
            section, role = "header", ""
        elif section == "header" and text != "Ċ":
            role += text
        elif section == "header":
            section = "content"
        elif text == "<|im_end|>":
            section = "between"
    assert example.mask.tolist() == expected
    assert trained_texts(example, chatml) == ["2<|im_end|>", "4\n\n4<|im_end|>"]
    rendered = tokenization.render_mask(example, chatml)
    assert "".join(text for text, _ in rendered) == full_text


def test_loss_on_all_trains_all_tokens(chatml):
    example = encode_one(chat("1+1?", "2"), chatml, loss_on="all")
    assert example.mask.tolist() == [False] + [True] * (len(example.tokens) - 1)


def test_loss_on_all_keeps_the_last_user_turn():
    tokenizer = build_tokenizer(CHANGES_HISTORY)
    record = chat("a?", "A", "b?")
    example = encode_one(record, tokenizer, loss_on="all")
    full_text = tokenizer.apply_chat_template(list(record.messages), tokenize=False)
    assert example.mask[1:].all()
    assert tokenizer.decode(example.tokens) == full_text


def test_trailing_user_turns_and_empty_replies_are_not_trained(chatml):
    example = encode_one(chat("a?", "", "b?", "B", "c?"), chatml)
    assert trained_texts(example, chatml) == ["B<|im_end|>"]
    assert "c?" not in chatml.decode(example.tokens)


@pytest.mark.parametrize("template", [DROPS_REASONING, GENERATION_MARKERS])
def test_template_that_drops_reasoning_gives_a_sequence_per_turn(template):
    tokenizer = build_tokenizer(template)
    record = chat("1+1?", THINKING, "again?", THINKING)
    encoded = tokenization.encode_all([record], tokenizer, max_seq_length=512)
    for example in encoded.examples:
        assert trained_texts(example, tokenizer) == [THINKING + "<|im_end|>"]
    later = tokenizer.decode(encoded.examples[1].tokens)
    assert "<|im_start|>assistant\n2<|im_end|>" in later
    assert (encoded.split, encoded.sequences) == (1, 2)
    [text] = tokenization.template_messages(vars(encoded))
    assert text.startswith("1 chats became 2 sequences")
    # Without thinking, the template drops nothing, and the turns are one sequence.
    encoded = tokenization.encode_all(
        [chat("a?", "A", "b?", "B")], tokenizer, max_seq_length=99
    )
    [example] = encoded.examples
    assert trained_texts(example, tokenizer) == ["A<|im_end|>", "B<|im_end|>"]
    assert (encoded.split, encoded.sequences) == (0, 0)


def test_empty_blocks_that_no_prompt_has_are_trained():
    """Of completions without a chat; `test_chat_table.py` has chats."""
    tokenizer = build_tokenizer(INSERTS_THINKING_LINES)
    record = DataRecord("f:1", prompt="1+1?", completion="2")
    target = "\n<think></think>\n2<|im_end|>"
    assert trained_texts(encode_one(record, tokenizer), tokenizer) == [target]


def test_template_that_changes_earlier_turns_is_refused():
    with pytest.raises(
        UserError, match=r"nothing to train.*changes the prompt: it asks with '1 mess"
    ):
        tokenization.encode_all(
            [chat("a", "b")], build_tokenizer(CHANGES_HISTORY), max_seq_length=99
        )


def test_template_error_skips_the_record():
    tokenizer = build_tokenizer("{{ raise_exception('no system turns') }}")
    with pytest.raises(UserError, match="rejects these messages: no system"):
        tokenization.encode_all([chat("a", "b")], tokenizer, max_seq_length=99)


def test_token_across_the_boundary_is_split():
    tokenizer = build_tokenizer(NO_MARKERS)
    prompt_text, full_text = "user: go\nassistant: ", "user: go\nassistant: thinking\n"
    prompt = tokenizer.encode(prompt_text, add_special_tokens=False)
    joined = tokenizer.encode(full_text, add_special_tokens=False)
    assert joined[: len(prompt)] != prompt
    example = encode_one(chat("go", "thinking"), tokenizer)
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert not example.mask[: len(prompt)].any()
    assert example.mask[len(prompt) :].all()
    # The template writes no end of a turn.
    assert tokenizer.decode(example.tokens) == full_text + "<|im_end|>"


def test_completion_that_merges_with_the_prompt():
    tokenizer = build_tokenizer(None)
    record = DataRecord("f:1", prompt="use", completion="r")
    joined = tokenizer.encode("user", add_special_tokens=False)
    prompt = tokenizer.encode("use", add_special_tokens=False)
    assert joined[: len(prompt)] != prompt
    example = encode_one(record, tokenizer)
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert trained_texts(example, tokenizer) == ["r<|im_end|>"]


def test_bos_is_added_once():
    tokenizer = build_tokenizer(WITH_BOS, bos=True)
    bos = tokenizer.bos_token_id
    for record in (
        chat("a", "b"),
        DataRecord("f:1", text="hello"),
        DataRecord("f:1", text="<s>hello"),
        DataRecord("f:1", prompt="hello", completion=" user"),
    ):
        tokens = encode_one(record, tokenizer).tokens.tolist()
        assert (tokens[0], tokens.count(bos)) == (bos, 1)
    tokenizer.chat_template = None
    record = DataRecord("f:1", prompt="a", completion="b")
    tokens = encode_one(record, tokenizer).tokens.tolist()
    assert (tokens[0], tokens.count(bos)) == (bos, 1)


def test_prompt_and_completion_use_the_chat_template(chatml):
    record = DataRecord("f:1", prompt="1+1?", completion="2", skill="addition")
    example = encode_one(record, chatml)
    assert (
        example.tokens.tolist() == encode_one(chat("1+1?", "2"), chatml).tokens.tolist()
    )
    assert (example.where, example.skill) == ("f:1", "addition")
    no_template = build_tokenizer(None)
    example = encode_one(record, no_template)
    assert tokenization.render_mask(example, no_template) == [
        ("1+1?", False),
        ("2<|im_end|>", True),
    ]


@pytest.mark.parametrize("count", [2, 8, 9, 15, 16, 40])
def test_windows_train_every_token_but_the_first_once(chatml, count):
    tokens = chatml.encode("z" * (count - 1), add_special_tokens=False)
    tokens.append(chatml.eos_token_id)
    record = DataRecord("f:1", text="z" * (count - 1))
    windows = encode(record, chatml, max_seq_length=8)
    assert all(2 <= len(w.tokens) <= 8 for w in windows)
    trained_tokens = [
        t
        for w in windows
        for t, is_trained in zip(w.tokens, w.mask, strict=True)
        if is_trained
    ]
    assert trained_tokens == tokens[1:]
    for before, after in pairwise(windows):
        assert before.tokens[-1] == after.tokens[0]


def test_end_token_inside_text_does_not_end_the_mask(chatml):
    example = encode_one(DataRecord("f:1", text="a<|im_end|>b"), chatml)
    assert example.mask.tolist() == [False, True, True, True]


def test_long_records_are_truncated_or_dropped(chatml):
    records = [chat("a", "b" * 40), chat("a" * 40, "b"), chat("a", "b")]
    encoded = tokenization.encode_all(records, chatml, max_seq_length=30)
    assert [len(e.tokens) for e in encoded.examples] == [30, 13]
    assert encoded.truncated == 1
    [(where, reason)] = encoded.dropped
    assert where == "f:1"
    assert reason.startswith("the prompt alone has 4")
    with pytest.raises(UserError, match="nothing to train on: all 1 examples") as error:
        tokenization.encode_all(records[1:2], chatml, max_seq_length=30)
    assert error.value.hint == "raise data.max_seq_length"


def test_chats_need_a_chat_template():
    with pytest.raises(UserError, match="chat examples need a chat template"):
        encode(chat("a", "b"), build_tokenizer(None), max_seq_length=99)


def test_empty_dataset_is_refused(chatml):
    with pytest.raises(UserError, match="nothing to train on"):
        tokenization.encode_all([], chatml, max_seq_length=99)


def test_tokenizer_truncation_is_disabled(chatml):
    record = chat("a", "b" * 40)
    full_text = encode_one(record, chatml).tokens.tolist()
    chatml.backend_tokenizer.enable_truncation(8)
    chatml.backend_tokenizer.enable_padding(length=99)
    assert encode_one(record, chatml).tokens.tolist() == full_text


def test_slow_tokenizer_and_mlx_lm_wrapper(chatml):
    utils = pytest.importorskip("mlx_lm.tokenizer_utils")

    class SlowTokenizer:
        chat_template = CHATML
        bos_token_id, eos_token_id = None, chatml.eos_token_id
        encode, decode = chatml.encode, chatml.decode
        apply_chat_template = chatml.apply_chat_template

    records = [chat("a?", "A", "b?", "B"), DataRecord("f:2", text="hello user")]
    expected = tokenization.encode_all(records, chatml, max_seq_length=99).examples
    for tokenizer in (SlowTokenizer(), utils.TokenizerWrapper(chatml)):
        examples = tokenization.encode_all(
            records, tokenizer, max_seq_length=99
        ).examples
        for expected_example, actual_example in zip(expected, examples, strict=True):
            assert expected_example.tokens.tolist() == actual_example.tokens.tolist()
            assert expected_example.mask.tolist() == actual_example.mask.tolist()
