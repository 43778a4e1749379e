"""Chat templates of 48 kinds x 27 chats: every turn is trained as it is served, or the
example is refused with its reason. The oracle has no code of lmx."""

import json
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from chat_oracle import (
    Cell,
    Oracle,
    build_tokenizer,
    is_trained,
    runs_of,
    served,
    split_reasoning,
)
from chat_rows import CHATS, LONG
from chat_templates import CHATML_STOPS, CHATML_TOKENS, PLAIN, Family
from chat_templates_channels import CHANNELS
from chat_templates_prompts import PROMPTS
from chat_templates_reasoning import REASONING
from chat_templates_tools import TOOLS
from lmx.data import tokenization
from lmx.data.dataset import DataRecord, RecordReader
from lmx.errors import UserError
from lmx.serving.prompts import checked_tools, encode_messages
from lmx.serving.protocol import ChatCompletionParameters

FAMILIES = PLAIN | TOOLS | REASONING | CHANNELS | PROMPTS
CALLS = "call call_with_content two_calls tool_result tools_many_turns"
REASONS = "reasoning reasoning_many_turns some_reasoning reasoning_and_calls"
# Turns that nest, that do not, that have no end, and that need another option.
LONG_FAMILIES = ["chatml", "llama2", "glm4", "qwen3", "gpt_oss", "nemotron_3"]
INLINE = "inline_reasoning inline_reasoning_many_turns"
ADJACENT = "adjacent_assistants adjacent_users untrained_greeting"
# The reason, the families and the chats of which every cell must be refused.
REFUSED = (
    # No system message.
    ("raises", "gemma2", "system system_many_turns tools_many_turns"),
    ("raises", "gemma2", "inline_reasoning_many_turns"),
    # These print neither calls nor reasoning.
    ("calls", " ".join(PLAIN), f"{CALLS} reasoning_and_calls"),
    ("calls", "lfm2", f"{CALLS} reasoning_and_calls"),
    ("calls", " ".join(PROMPTS), f"{CALLS} reasoning_and_calls"),
    # Its ids are to hold the names of the functions.
    ("calls", "kimi_k2", f"{CALLS} reasoning_and_calls"),
    # It prints one call of a turn.
    ("calls", "gpt_oss", "two_calls"),
    ("reasoning", " ".join(PLAIN | TOOLS), REASONS),
    ("reasoning", "hunyuan", REASONS),
    ("reasoning", "nemo no_system first_system answer_only lines", REASONS),
    # They drop it from the content, and their prompts open no block for it.
    ("content", "marked hunyuan", INLINE),
    # A call replaces the content.
    ("content", "llama31 mistral_v3 mistral_v7", "call_with_content"),
    # Roles must alternate.
    (
        "raises",
        "llama2 gemma2 mistral_v3 nemo",
        ADJACENT,
    ),
    ("raises", "gemma2", "later_system"),
    # Only one call; an answer must not be empty.
    ("raises", "llama31", "two_calls"),
    ("raises", "mistral_v13", "empty_turn"),
    # The end of a turn depends on what follows: a newline, or an empty block.
    ("changes", "olmo2 qwen3 qwen3_thinking", "adjacent_assistants"),
    # An answer removes the reasoning from the calls before it.
    ("changes", "gpt_oss", "reasoning_and_calls"),
    # The prompt lacks the tools, the system message, later ones, or all messages.
    ("tools", "deepseek_v3 deepseek_r1 deepseek_v31", f"{CALLS} reasoning_and_calls"),
    ("tools", "phi4_mini", "call call_with_content two_calls tool_result"),
    ("message", "no_system", "system system_many_turns inline_reasoning_many_turns"),
    ("message", "no_system", "later_system"),
    ("message", "answer_only", " ".join({*CHATS} - {"assistant_first"})),
)
# Families that take a system message at the start alone: a later one joins the message
# of the user.
FIRST_SYSTEM = (
    *(
        "llama2",
        "mistral_v3",
        "mistral_v7",
        "nemo",
        "first_system",
        "falcon_h1",
        "lfm2",
    ),
    *("nemotron_h", "nemotron_3", "minimax_m2", "gpt_oss", "gemma4"),
)
# One of these is in the reason that lmx gives.
WORDS = {
    "raises": ["rejects", "starts with the assistant"],
    "content": ["content"],
    "reasoning": ["reasoning"],
    "calls": ["tool_calls"],
    "changes": ["changes", "differ", "prompt"],
    "first": ["starts with the assistant"],
    "message": ["does not write message"],
    "tools": ["does not write tools"],
}


@dataclass(frozen=True)
class Trained:
    """An example, as lmx makes them."""

    tokens: np.ndarray
    mask: np.ndarray


@cache
def oracle(name: str) -> Oracle:
    return Oracle(FAMILIES[name])


@cache
def cell(name: str, chat: str) -> Cell:
    row = CHATS[chat]
    if chat == "later_system" and name in FIRST_SYSTEM:
        *start, system, asks, answer = row["messages"]
        asks = asks | {"content": f"{system['content']}\n\n{asks['content']}"}
        row = row | {"messages": [*start, asks, answer]}
    return oracle(name).cell(row)


@cache
def tokenizer(name: str):
    return build_tokenizer(FAMILIES[name])


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> dict:
    """The record of every chat, or the reason why it has none."""
    folder, records = tmp_path_factory.mktemp("chats"), {}
    for name, row in (CHATS | {"long": LONG}).items():
        path = folder / f"{name}.jsonl"
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
        try:
            [records[name]] = RecordReader(str(path))
        except UserError as error:
            records[name] = str(error)
    return records


def encoded(record: DataRecord | str, tokenizer) -> tuple[list, str]:
    """The examples of a record, and the reason why it has none."""
    if isinstance(record, str):
        return [], record
    result = tokenization.encode_block(
        [record], tokenizer, max_seq_length=1 << 20, loss_on="completions"
    )
    return result.examples, " ".join(why for _, why in result.dropped)


@pytest.fixture(scope="module")
def encoded_cell(records):
    """A function from the names of a family and a chat to what `encoded` gives."""
    return cache(lambda name, chat: encoded(records[chat], tokenizer(name)))


def problem_of(cell: Cell, result: tuple[list, str], tokenizer) -> str:
    """What is wrong with what lmx makes of a cell.

    Args:
        result: what `encoded` gives.
    """
    examples, reason = result
    if not reason:
        wrong = cell.judge(examples, tokenizer)
        return f"{wrong}\n  it must be refused" if wrong and cell.reasons else wrong
    if examples:
        return f"trained and refused: {reason}"
    if not cell.reasons:
        return f"wrongly refused: {reason}"
    words = [word for why in cell.reasons for word in WORDS.get(why, [""])]
    is_named = not words or any(word in reason for word in words)
    return "" if is_named else f"refused, but not for {cell.reasons}: {reason}"


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_are_trained_as_served_or_refused(name, encoded_cell):
    problems = {
        chat: problem_of(cell(name, chat), encoded_cell(name, chat), tokenizer(name))
        for chat in CHATS
    }
    wrong = [f"{chat}: {problem}" for chat, problem in problems.items() if problem]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(CHATS)} chats", *wrong])


@pytest.mark.parametrize("name", LONG_FAMILIES)
def test_turns_of_a_long_chat_are_trained_as_served(name, encoded_cell):
    cell = oracle(name).cell(LONG)
    assert not cell.reasons
    assert problem_of(cell, encoded_cell(name, "long"), tokenizer(name)) == ""


def served_prompts(oracle: Oracle, row: dict, tokenizer) -> list[set[tuple]]:
    """The tokens that `lmx serve` sends to the model for every trained turn of a row:
    as a request without options asks, and with the template's switch."""
    prompts = []
    for index, turn in enumerate(served(row)):
        if not is_trained(turn):
            continue
        thinks = bool(split_reasoning(turn)[0])
        body = {"messages": row["messages"][:index], "tools": row.get("tools")}
        prompts.append(set())
        for options in ({}, *({name: thinks} for name in oracle.switches)):
            parameters = ChatCompletionParameters.parse(
                body | {"chat_template_kwargs": options}
            )
            prompt = encode_messages(tokenizer, parameters, checked_tools(parameters))
            prompts[-1].add(tuple(prompt.tokens))
    return prompts


def unserved(examples: list, prompts: list[set[tuple]], tokenizer) -> list[str]:
    """The prompts of trained turns that are not those of a server, turn by turn."""
    starts = sorted(
        (
            example.tokens[:start].tolist()
            for example in examples
            for start, _ in runs_of(example, tokenizer)
        ),
        key=len,
    )
    assert len(starts) == len(prompts)
    return [
        tokenizer.decode(start)
        for start, sent in zip(starts, prompts, strict=True)
        if tuple(start) not in sent
    ]


@pytest.mark.filterwarnings("ignore:system messages are merged")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_trained_prompt_is_one_of_lmx_serve(name, encoded_cell):
    """In its tokens, and so in its text."""
    rows = CHATS | ({"long": LONG} if name in LONG_FAMILIES else {})
    seen = 0
    for chat, row in rows.items():
        examples, _ = encoded_cell(name, chat)
        if examples:
            prompts = served_prompts(oracle(name), row, tokenizer(name))
            assert unserved(examples, prompts, tokenizer(name)) == [], chat
            seen += 1
    assert seen > 5 or name == "answer_only"


@pytest.mark.parametrize("name", ["switched", "qwen3_thinking", "nemo"])
def test_another_prompt_is_none_of_lmx_serve(name, records):
    """The prompt without its block, or with the text of another turn."""
    [example], _ = encoded(records["system"], tokenizer(name))
    prompts = served_prompts(oracle(name), CHATS["system"], tokenizer(name))
    start = example.mask.tolist().index(True)
    for cut in (1, 2):
        tokens = np.delete(example.tokens, range(start - cut, start))
        mask = np.delete(example.mask, range(start - cut, start))
        assert unserved([Trained(tokens, mask)], prompts, tokenizer(name))


# No public template is like these; mutated ones were silently wrong.
ODD = {
    # Nothing stands before the first answer.
    "no_prompt": """{%- for m in messages if m.role == 'assistant' %}
{{- m.content + '<|im_end|>' }}{%- endfor %}""",
    # The block of the prompt and that of the turn begin in other ways.
    "other_block": r"""{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>' if m.role != 'user' }}
{{- m.content + '<|im_end|>' }}
{%- endfor %}
{{- '<|im_start|>assistant<think>\n' if add_generation_prompt }}""",
}


@pytest.mark.parametrize("name", ODD)
def test_turns_that_no_prompt_leads_to_are_refused(name, records):
    family = Family(ODD[name], CHATML_TOKENS, CHATML_STOPS)
    for chat in ("one_turn", "reasoning_many_turns", "long"):
        cell = Oracle(family).cell((CHATS | {"long": LONG})[chat])
        assert cell.reasons
        tokenizer = build_tokenizer(family)
        assert problem_of(cell, encoded(records[chat], tokenizer), tokenizer) == ""


def test_refusals_have_a_cause_in_the_family():
    """What must be refused is in the table, and nothing else."""
    table = {
        (name, chat): reason
        for reason, names, chats in reversed(REFUSED)
        for name in names.split()
        for chat in chats.split()
    }
    cells = {
        (name, chat): cell(name, chat).reasons
        for name in FAMILIES
        for chat in CHATS
        if chat != "assistant_first"
    }
    must = {cell: reasons for cell, reasons in cells.items() if reasons}
    assert must.keys() == table.keys()
    other = {cell: must[cell] for cell in must if table[cell] not in must[cell]}
    assert not other


def right_examples(name: str, chat: str) -> list[tuple[list[int], list[bool]]]:
    """One sequence per turn: its first pair."""
    examples = []
    for pairs in cell(name, chat).complete.values():
        prompt, target = (
            tokenizer(name).encode(text, add_special_tokens=False)
            for text in (pairs[0].prompt, pairs[0].target)
        )
        mask = [False] * len(prompt) + [True] * len(target)
        examples.append((prompt + target, mask))
    return examples


def judged(name: str, chat: str, examples) -> str:
    made = [Trained(np.array(tokens), np.array(mask)) for tokens, mask in examples]
    return cell(name, chat).judge(made, tokenizer(name))


def one_sequence(name: str, chat: str) -> list[tuple[list[int], list[bool]]]:
    """The sequence of the last turn, in which the earlier turns are trained, too."""
    examples = right_examples(name, chat)
    tokens, mask = examples[-1]
    for earlier, spans in examples[:-1]:
        assert tokens[: len(earlier)] == earlier
        mask = [a or b for a, b in zip(mask, spans, strict=False)] + mask[len(spans) :]
    return [(tokens, mask)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_oracle_takes_its_own_sequences(name):
    for chat in CHATS:
        if not cell(name, chat).reasons:
            assert judged(name, chat, right_examples(name, chat)) == ""


@pytest.mark.parametrize(
    ("name", "chat"),
    [
        *((name, "many_turns") for name in ("chatml", "glm4", "deepseek_v2")),
        # Nothing lies between the two turns.
        ("mistral_v7", "adjacent_assistants"),
    ],
)
def test_the_oracle_takes_turns_that_nest_in_one_sequence(name, chat):
    examples = one_sequence(name, chat)
    assert sum(examples[0][1]) > 10
    assert judged(name, chat, examples) == ""


def test_the_oracle_finds_an_end_that_no_prompt_has():
    """The template prints no end of turn, so no sequence has two turns."""
    examples = right_examples("no_end_of_turn", "many_turns")
    (first, trained), (second, also), *others = examples
    length = len(first) - 1
    assert first[:length] == second[:length]
    joined = first + second[length:], trained + also[length:]
    assert "silent" in judged("no_end_of_turn", "many_turns", [joined, *others])


def without_stop(tokens, mask):
    return tokens[:-1], mask[:-1]


def untrained_stop(tokens, mask):
    return tokens, [*mask[:-1], False]


def trained_past_the_stop(tokens, mask):
    return [*tokens, tokens[2]], [*mask, True]


def later_border(tokens, mask):
    start = mask.index(True)
    return tokens, [*mask[:start], False, *mask[start + 1 :]]


def earlier_border(tokens, mask):
    start = mask.index(True)
    return tokens, [*mask[: start - 1], True, *mask[start:]]


def trained_user(tokens, mask):
    return tokens, [False, *[True] * 5, *mask[6:]]


def prompt_in_pieces(tokens, mask):
    """The tokens of the prompt's characters, as if no text were merged."""
    start, fast = mask.index(True), tokenizer("chatml")
    added = set(fast.get_added_vocab().values())
    prompt = []
    for token in tokens[:start]:
        text = fast.decode([token])
        letters = [text] if token in added else text
        prompt += [t for part in letters for t in fast.encode(part)]
    return prompt + tokens[start:], [False] * len(prompt) + mask[start:]


def nothing_trained(tokens, mask):
    return tokens, [False] * len(mask)


@pytest.mark.parametrize(
    "damage",
    [
        without_stop,
        untrained_stop,
        trained_past_the_stop,
        later_border,
        earlier_border,
        trained_user,
        prompt_in_pieces,
        nothing_trained,
    ],
)
def test_the_oracle_finds_a_damaged_turn(damage):
    first, *others = right_examples("chatml", "many_turns")
    assert judged("chatml", "many_turns", [damage(*first), *others])


def test_the_oracle_finds_turns_that_are_missing_or_repeated():
    examples = right_examples("chatml", "many_turns")
    assert "untrained" in judged("chatml", "many_turns", examples[:-1])
    assert judged("chatml", "many_turns", [*examples, examples[0]])
    assert judged("chatml", "many_turns", right_examples("chatml", "repeats"))


@pytest.mark.parametrize(
    ("name", "chat", "prompt", "target"),
    [
        # Without the reasoning.
        (
            "qwen3",
            "reasoning",
            "<|im_start|>assistant\n",
            "Ahoy, I am the cook.<|im_end|>",
        ),
        # An empty block of the template is trained.
        (
            *("qwen3", "one_turn", "<|im_start|>assistant\n"),
            "<think>\n\n</think>\n\nAhoy, I am the cook.<|im_end|>",
        ),
        # No request has a prompt that ends within the block.
        (
            *("qwen3", "one_turn", "<|im_start|>assistant\n<think>\n"),
            "\n</think>\n\nAhoy, I am the cook.<|im_end|>",
        ),
        # No stop token, and the wrong one.
        ("glm4", "one_turn", "<|assistant|>\n", "Ahoy, I am the cook."),
        ("glm4", "one_turn", "<|assistant|>\n", "Ahoy, I am the cook.<|endoftext|>"),
        # The whole content and no call.
        ("chatml", "call", "<|im_start|>assistant\n", "<|im_end|>"),
    ],
)
def test_the_oracle_finds_a_wrong_pair(name, chat, prompt, target):
    before = oracle(name).text(
        CHATS[chat]["messages"][:1], CHATS[chat].get("tools"), {}
    )
    ids = [
        tokenizer(name).encode(text, add_special_tokens=False)
        for text in (before + prompt, target)
    ]
    mask = [False] * len(ids[0]) + [True] * len(ids[1])
    assert "silent" in judged(name, chat, [(ids[0] + ids[1], mask)])
