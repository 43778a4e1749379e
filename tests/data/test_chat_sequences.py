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
SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "content": "30 degrees"}
THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning_content": "Rome is hot"}
# Reasoning apart from the content, of turns after the last user message only.
REASONING = CHATML.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content }}",
)
OPENS = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
# The template closes it with a newline, and prints none for a turn without reasoning.
OPENS_TAGS = CHATML.replace(
    "assistant\n{% endif", "assistant\n<think>{% endif"
).replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n{% endif %}"
    "{{ m.content }}",
)
# Mistral: before the last message, if it is the user's.
MOVES = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>"
    "{{ messages[0].content if loop.last and messages[0].role == 'system' and "
    "m.role == 'user' }}"
    "{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
NO_SYSTEM = CHATML.replace("in messages %}", "in messages if m.role != 'system' %}")
FIRST_SYSTEM = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages[:1] + (messages[1:] | rejectattr('role', 'equalto', 'system')"
    " | list) %}",
)
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
        [["so</think>"]],
    ),
    "reasoning that no turn has": (
        *(R1, [USER, THOUGHT]),
        [["Rome is hot\n</think>\n\nYes."]],
    ),
    "no reasoning after a prompt that opens it": (R1, ONE, [["\n</think>\n\nYes."]]),
    "closed as the template closes it": (
        *(OPENS_TAGS, ONE),
        [["</think>\nYes."]],
    ),
    "never closed": (
        *(OPENS, [USER, turn("<think>\nYes.")]),
        "message 2 does not close the chain of thought that the prompt opens",
    ),
    "dropped": (CHATML, [USER, THOUGHT], "does not write the reasoning of message 2"),
    "a system message that moves": (MOVES, [SYSTEM, *ONE], [["Yes."]]),
    "no system message": (
        *(NO_SYSTEM, [SYSTEM, *ONE]),
        "does not write message 1, of the role system",
    ),
    "a later system message": (
        *(FIRST_SYSTEM, [SYSTEM, *ONE, SYSTEM, *ONE]),
        [["Yes.", "Yes."]],
    ),
    "no results of tools": (
        *(NO_SYSTEM.replace("system", "tool"), [*ONE, RESULT, turn("No.")]),
        "does not write message 3, of the role tool",
    ),
    "no text of the user": (
        "<|im_start|>{{ messages[-1].content + '<|im_end|>' "
        "if not add_generation_prompt }}",
        ONE,
        "does not write message 1, of the role user",
    ),
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


# The smallest template with a block in the generation prompt only.
SWITCHED = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n"
    "{% endif %}{% endif %}"
)


@pytest.mark.parametrize("thinking", [None, False, True])
def test_a_block_of_the_generation_prompt_stays_in_the_prompt(thinking):
    """Its end is trained only if the record asks for the prompt that opens it."""
    options = {} if thinking is None else {"enable_thinking": thinking}
    record = DataRecord("f:1", messages=tuple(ONE), chat_template_kwargs=options)
    tokenizer = build_tokenizer(SWITCHED)
    encoded = tokenization.encode_all([record], tokenizer, max_seq_length=99)
    spans = tokenization.render_mask(encoded.examples[0], tokenizer)
    (prompt, _), (target, _) = spans
    opened = "<|im_start|>assistant\n<think>\n"
    closing = "\n</think>\n\n"
    assert prompt.endswith(opened if thinking else opened + closing)
    assert target == closing * bool(thinking) + f"Yes.{END}"
    assert encoded.without_thought == bool(thinking)
    texts = list(tokenization.template_messages(vars(encoded)))
    assert len(texts) == bool(thinking)
    assert all(text.startswith("1 examples have turns without a") for text in texts)


def test_options_that_the_template_does_not_know_skip_the_example():
    """`lmx serve` refuses such a request."""
    record = DataRecord("f:1", messages=tuple(ONE), chat_template_kwargs={"depth": 1})
    encoded = tokenization.encode_block(
        [record], build_tokenizer(CHATML), max_seq_length=99, loss_on="completions"
    )
    assert "has no depth, which is in its chat_template_kwargs" in encoded.dropped[0][1]


@pytest.mark.parametrize("loss_on", ["completions", "all"])
def test_tools_that_the_template_does_not_print_skip_the_example(loss_on):
    """Also if the user names one."""
    tools = ({"type": "function", "function": {"name": "warm"}},)
    record = DataRecord("f:1", messages=tuple(ONE), tools=tools)
    options = {"max_seq_length": 99, "loss_on": loss_on}
    for template, count in ((CHATML, 0), ("{{ tools | tojson if tools }}" + CHATML, 1)):
        encoded = tokenization.encode_block(
            [record], build_tokenizer(template), **options
        )
        assert len(encoded.examples) == count
        reasons = [reason for _, reason in encoded.dropped]
        assert reasons == ["the chat template does not write tools"] * (1 - count)


def test_an_answer_with_a_token_across_its_edge_is_a_sequence_of_its_own():
    """So that the later turns have the tokens of a request."""
    template = PLAIN.replace("assistant:{% endif", "assistant: {% endif").replace(
        "\n{% endfor", "<|im_end|>{% endfor"
    )
    tokenizer = build_tokenizer(template)
    record = chat("a", "thinking", "b", " user", "c", "thinking")
    encoded = tokenization.encode_all([record], tokenizer, max_seq_length=99)
    assert (encoded.split, encoded.sequences) == (1, len(encoded.examples))
    assert encoded.sequences > 1
    for example in encoded.examples:
        tokens, mask = example.tokens.tolist(), example.mask.tolist()
        starts = [n for n in range(1, len(mask)) if mask[n] and not mask[n - 1]]
        for start in starts:
            prompt = tokenizer.decode(tokens[:start])
            assert tokenizer.encode(prompt, add_special_tokens=False) == tokens[:start]
