"""Long chats have the tokens and masks that encoding every prefix of them gives."""

import random
import time

import pytest
from lmx.data import chat_spans, chat_template, tokenization
from lmx.data.chat_rendering import NoTrainableTokens
from lmx.data.record_formats import DataRecord
from lmx.data.token_edges import encode_with_edges
from test_tokenization import (
    CHANGES_HISTORY,
    CHATML,
    DROPS_REASONING,
    GENERATION_MARKERS,
    INSERTS_THINKING,
    INSERTS_THINKING_LINES,
    NO_MARKERS,
    WITH_BOS,
    build_tokenizer,
    chat,
    trained_texts,
)

# Qwen3: reasoning stays after the last question; results of tools are user turns.
QWEN3 = """\
{%- if messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(looking=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.looking and message.role == 'user' %}
{%- set ns.looking = false %}{%- set ns.last = index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content, thought = message.content, '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content.lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + (call|tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TRIMS = CHATML.replace("m.content }}", "m.content | trim }}")
# Mistral: no generation prompt, the system turn belongs to the first user turn.
ALTERNATES = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "<s>{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}<|im_start|>{{ first ~ m.content if loop.first "
    "else m.content }}<|im_end|>{% else %} {{ m.content | trim }}<|endoftext|>"
    "{% endif %}{% endfor %}"
)
COUNTS_TURNS = CHATML.replace(
    "{{ m.role }}", "{{ m.role }}{{ loop.index if m.role == 'user' }}"
)
KEEPS_THE_END = "{% set messages = messages[-6:] %}" + CHATML
DROPS_OLD_REASONING = DROPS_REASONING.replace(
    "if loop.last", "if loop.index > loop.length - 8"
)
# Windows fit these; they do not fit the others.
LOCAL = {
    "CHATML": CHATML,
    "INSERTS_THINKING": INSERTS_THINKING,
    "INSERTS_THINKING_LINES": INSERTS_THINKING_LINES,
    "NO_MARKERS": NO_MARKERS,
    "WITH_BOS": WITH_BOS,
    "QWEN3": QWEN3,
    "TRIMS": TRIMS,
    "ALTERNATES": ALTERNATES,
}
TEMPLATES = LOCAL | {
    "CHANGES_HISTORY": CHANGES_HISTORY,
    "COUNTS_TURNS": COUNTS_TURNS,
    "DROPS_REASONING": DROPS_REASONING,
    "DROPS_OLD_REASONING": DROPS_OLD_REASONING,
    "GENERATION_MARKERS": GENERATION_MARKERS,
    "KEEPS_THE_END": KEEPS_THE_END,
}
CASES = 8
WORDS = ["2", "hello", " user", "thinking\n\n", "é\u2028", "<think>so</think>", "a b "]


def every_prefix(messages, turns, text, tokenizer, tools):
    """The spans by their definition: every prefix of the chat is rendered."""
    view = chat_spans.ChatView(messages, text, None, tokenizer, tools)
    last = messages[-1]["content"].strip()
    before, _, suffix = text.rpartition(last) if last else ("", "", "")
    spans = []
    for index in turns:
        start = view.end_of(index, add_generation_prompt=True) if index else None
        if start is None:
            spans.append(None)
            continue
        content, end = messages[index]["content"].strip(), len(text)
        if not content.startswith("<think>"):
            inserted = chat_spans.EMPTY_THINKING.match(text[start:]).group()
            start += len(inserted)
        if index < len(messages) - 1:
            end = view.end_of(index + 1) or 0
            if not end and before and text.startswith(content + suffix, start):
                end = start + len(content + suffix)
        spans.append((start, end) if start < end else None)
    return spans


def encode_every_prefix(record, tokenizer):
    """Tokens, mask and `last_only` by their definition; the reason if it is skipped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "find_spans", every_prefix)
        try:
            plan = chat_template.render(record, tokenizer)
            tokens, mask = plan.marked or mask_every_prefix(plan, tokenizer)
        except NoTrainableTokens as error:
            return str(error)
    mask = [False, *mask[1:]]
    return (tokens, mask, plan.last_only) if any(mask) else "it has no trainable token"


def mask_every_prefix(plan, tokenizer):
    tokens, *edges = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in [plan.text, *(plan.text[:edge] for edge in plan.edges)]
    )
    if any(tokens[: len(edge)] != edge for edge in edges):
        return tokenization._by_segment(plan, tokens, tokenizer)
    mask = [False] * len(tokens)
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        mask[len(start) : len(end)] = [True] * (len(end) - len(start))
    return tokens, tokenization._until_end_of_turn(plan, tokens, mask, tokenizer)


def encode(record, tokenizer):
    encoded = tokenization.encode_block(
        [record], tokenizer, max_seq_length=1 << 20, loss_on="completions"
    )
    for example in encoded.examples:
        mask = example.mask.tolist()
        return example.tokens.tolist(), mask, bool(encoded.last_only)
    return encoded.dropped[0][1]


def random_chat(rng, length):
    """Mostly user and assistant in turn; sometimes tools, no reply, or two in a row."""
    words = rng.sample(WORDS, rng.randint(1, len(WORDS)))
    messages = [{"role": "system", "content": "Be brief."}] * rng.randint(0, 1)
    wild = rng.choice([0.0, 0.0, 0.1, 0.4])
    for number in range(length):
        role = "assistant" if number % 2 else "user"
        if rng.random() < wild:
            role = rng.choice(["assistant", "user", "tool"])
        content = "".join(rng.choices(words, k=rng.choice([0, 1, 1, 2, 3])))
        turn = {"role": role, "content": content or "x" * (rng.random() > wild)}
        if role == "assistant" and rng.random() < wild / 2:
            turn["tool_calls"] = [{"function": {"name": "f"}}]
        messages.append(turn)
    return DataRecord(
        "f:1", messages=(*messages, {"role": "assistant", "content": "z"})
    )


@pytest.fixture(params=TEMPLATES)
def templated(request, monkeypatch):
    """A tokenizer, and windows so small that short chats have many."""
    monkeypatch.setattr(chat_spans, "EXACT_TURNS", 2)
    monkeypatch.setattr(chat_spans, "BLOCK", 3)
    return build_tokenizer(TEMPLATES[request.param], bos=request.param == "WITH_BOS")


def test_windows_give_what_every_prefix_gives(templated):
    rng = random.Random(templated.chat_template)
    for _ in range(CASES):
        record = random_chat(rng, rng.randint(6, 40))
        assert encode(record, templated) == encode_every_prefix(record, templated)


@pytest.mark.parametrize("name", TEMPLATES)
def test_windows_are_used_where_they_fit(name, monkeypatch):
    """So that the test above compares two ways."""
    tokenizer = build_tokenizer(TEMPLATES[name], bos=name == "WITH_BOS")
    reply = "A" if name in LOCAL else "<think>so</think>A"
    messages = list(chat(*["a?", reply, "b?", "B"] * 20).messages)
    turns = [index for index, turn in enumerate(messages) if index % 2]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    view = chat_spans.ChatView.whole(messages, text, tokenizer)
    calls = []
    render = chat_spans.render_messages
    monkeypatch.setattr(
        chat_spans,
        "render_messages",
        lambda part, *args, **options: (
            calls.append(len(part)) or render(part, *args, **options)
        ),
    )
    spans = chat_spans._find_in_windows(view, turns)
    if name in LOCAL:
        assert all(spans)
        assert sum(calls) < 3_000  # every prefix: 80 renderings, 40 messages each
    else:
        assert spans is None or spans[0] is None


def test_long_chat_takes_seconds():
    """2,000 turns took 102 s and 4.6 GB when every prefix was encoded."""
    tokenizer = build_tokenizer(QWEN3)
    record = chat(*["how are you?", "I am fine, thank you."] * 1_000)
    start = time.process_time()
    [example] = tokenization.encode(record, tokenizer, max_seq_length=1 << 20)
    assert time.process_time() - start < 15
    texts = trained_texts(example, tokenizer)
    assert texts == ["I am fine, thank you.<|im_end|>"] * 1_000


def test_chat_too_long_for_its_template_is_skipped(monkeypatch):
    tokenizer = build_tokenizer(COUNTS_TURNS)
    record = chat(*["a?", "A"] * 40)
    assert len(tokenization.encode(record, tokenizer, max_seq_length=9999)) == 1
    monkeypatch.setattr(chat_spans, "MAX_CHARACTERS", 1_000)
    reason = encode(record, tokenizer)
    assert "the chat has 40 turns and" in reason
    assert "at most 1,000" in reason


def test_edges_need_the_tokens_of_the_text_before_them_alone():
    """A space goes to the next word, so the edge after it has other tokens alone."""
    tokenizer = build_tokenizer(CHATML)
    text = "<|im_start|>user thinking<|im_end|> user"
    before, inside = text.index(" thinking"), text.index("thinking")
    for edge, found in ((before, True), (inside, False)):
        [encoded] = encode_with_edges([(text, [edge])], tokenizer)
        assert (encoded.edges is not None) == found
