"""Every turn is trained as it is served, in templates that do more than to list turns.

`test_chat_table.py` compares many templates with an oracle. These are the cases that no
family has, and reasons.
"""

import pytest
from lmx.data import tokenization
from lmx.data.record_formats import DataRecord
from lmx.errors import UserError
from test_tokenization import CHATML, build_tokenizer, chat, trained_texts

END = "<|im_end|>"
USER = {"role": "user", "content": "Is it warm?"}
CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"in": "Rome"}},
}
THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning_content": "Rome is hot"}
# Reasoning apart from the content, of turns after the last user message only.
REASONING = CHATML.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content }}",
)
OPENS = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
# R1: the prompt opens a chain of thought, which no text of a turn has.
R1 = OPENS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1].strip() }}")
CALLS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}",
)
NAMES_ONLY = CALLS.replace("{{ c.function.arguments | tojson }}", "")
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MERGES = (
    "{% for m in messages %}{% if m.role == 'user' or loop.previtem.role == 'user' %}"
    "<|im_start|>{{ m.role }}\n{% endif %}{{ m.content }}"
    "{% if loop.last or loop.nextitem.role == 'user' or m.role == 'user' %}<|im_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)


def turn(content, **extra):
    return {"role": "assistant", "content": content, **extra}


ONE = [USER, turn("Yes.")]
CALLED = [USER, turn("", tool_calls=[CALL])]
NO_CALLS = "does not write the tool_calls of message 2"


# A template, messages, and the trained texts of each sequence without the end token, or
# the reason why there are none.
CASES = {
    "as the model wrote it, on one line": (
        *(OPENS, [USER, turn("<think>so</think>Yes.")]),
        [["so</think>Yes."]],
    ),
    "reasoning without an answer": (
        *(R1, [USER, turn("<think>so</think>")]),
        "does not write the content of message 2",
    ),
    "dropped": (R1, [USER, THOUGHT], "does not write the reasoning of message 2"),
    "no calls": (CHATML, CALLED, NO_CALLS),
    "names of calls": (NAMES_ONLY, CALLED, NO_CALLS),
    "names of calls, arguments in the content": (
        *(NAMES_ONLY, [USER, turn("in Rome", tool_calls=[CALL])]),
        NO_CALLS,
    ),
    "merged turns": (MERGES, [*ONE, turn("No.")], "changes the prompt: it asks with"),
    "end token in a turn": (
        *(CHATML, [USER, turn(f"Yes.{END}No.")]),
        "does not write the content of message 2",
    ),
    "assistant first": (CHATML, [turn("Hello."), *ONE], "starts with the assistant"),
    "constant": ("Hello.", ONE, "does not write the content of message 2"),
}


@pytest.mark.parametrize("name", CASES)
def test_turns_are_trained_as_they_are_served(name):
    template, messages, trained = CASES[name]
    tokenizer = build_tokenizer(template)
    record = DataRecord("f:1", messages=tuple(messages))
    encoded = tokenization.encode_block(
        [record], tokenizer, max_seq_length=512, loss_on="completions"
    )
    found = [trained_texts(example, tokenizer) for example in encoded.examples]
    if isinstance(trained, str):
        assert trained in encoded.dropped[0][1]
        assert not found
    else:
        assert found == [[text + END for text in texts] for texts in trained]


def test_end_of_sequence_is_named_where_the_template_has_no_end():
    tokenizer = build_tokenizer(PLAIN)
    encoded = tokenization.encode_all(
        [chat("a", "b"), chat("a", "b", "c", "d")], tokenizer, max_seq_length=99
    )
    assert (encoded.ended, encoded.split, encoded.sequences) == (2, 1, 2)
    texts = list(tokenization.template_messages(vars(encoded)))
    assert texts[1].startswith("2 examples end with the end-of-sequence token")
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="nor the tokenizer has a token"):
        tokenization.encode_all([chat("a", "b")], tokenizer, max_seq_length=99)


def test_sequences_that_max_seq_length_cuts_off_count_as_truncated():
    tokenizer = build_tokenizer(REASONING)
    messages = [USER, THOUGHT] * 8
    record = DataRecord("f:1", messages=tuple(messages))
    encoded = tokenization.encode_all([record], tokenizer, max_seq_length=120)
    assert 0 < len(encoded.examples) < 8
    assert encoded.truncated == 1


def test_text_that_is_trained_as_a_whole_has_all_calls():
    """Earlier reasoning may be missing, as when it is served."""
    options = {"max_seq_length": 512, "loss_on": "all"}
    record = DataRecord("f:1", messages=(USER, THOUGHT, USER, THOUGHT))
    tokenizer = build_tokenizer(REASONING)
    assert len(tokenization.encode_block([record], tokenizer, **options).examples) == 1
    record = DataRecord("f:1", messages=(USER, turn("", tool_calls=[CALL])))
    for template, count in ((CALLS, 1), (CHATML, 0)):
        encoded = tokenization.encode_block(
            [record], build_tokenizer(template), **options
        )
        assert len(encoded.examples) == count
