"""Long chats have the sequences that rendering every prefix of them gives."""

import random
import time

import pytest
from chat_templates_reasoning import REASONING
from lmx.data.chat import sequences
from lmx.data.chat.messages import is_completion
from lmx.data.chat.rendering import ChatTemplate, NoTrainableTokens
from lmx.data.chat.sequences import join_turns
from lmx.data.chat.turns import Chat, find_turn
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
    encode_one,
    trained_texts,
)

TRIMS = CHATML.replace("m.content }}", "m.content | trim }}")
# Mistral: no generation prompt, the system turn belongs to the first user turn.
ALTERNATES = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "<s>{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}<|im_start|>{{ first ~ m.content if loop.first "
    "else m.content }}<|im_end|>{% else %} {{ m.content | trim }}<|im_end|>"
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
    "INSERTS_THINKING_LINES": INSERTS_THINKING_LINES,
    "WITH_BOS": WITH_BOS,
    "TRIMS": TRIMS,
    "ALTERNATES": ALTERNATES,
}
TEMPLATES = LOCAL | {
    "INSERTS_THINKING": INSERTS_THINKING,
    "NO_MARKERS": NO_MARKERS,
    "QWEN3": REASONING["qwen3"].template,
    "CHANGES_HISTORY": CHANGES_HISTORY,
    "COUNTS_TURNS": COUNTS_TURNS,
    "DROPS_REASONING": DROPS_REASONING,
    "DROPS_OLD_REASONING": DROPS_OLD_REASONING,
    "GENERATION_MARKERS": GENERATION_MARKERS,
    "KEEPS_THE_END": KEEPS_THE_END,
}
CASES = 8
WORDS = ["2", "hello", " user", "thinking\n\n", "é\u2028", "<think>so</think>", "a b "]


def chat_and_turns(record, tokenizer):
    """As `tokenization` calls the functions under test."""
    messages = list(record.messages)
    turns = [n for n, message in enumerate(messages) if is_completion(message)]
    return Chat(ChatTemplate(tokenizer), messages, None, {}), turns


def every_prefix(chat, turns):
    """The sequences by their definition: every prefix of the chat is rendered."""
    return join_turns([find_turn(chat, index) for index in turns])


def outcome(find, chat, turns):
    """The texts and spans up to the last turn; None if the chat is refused."""
    try:
        sequences = find(chat, turns)
    except NoTrainableTokens:
        return None
    return [(s.text[: s.spans[-1][1]], s.spans, s.add_eos) for s in sequences]


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
    monkeypatch.setattr(sequences, "EXACT_TURNS", 2)
    monkeypatch.setattr(sequences, "BLOCK", 3)
    return build_tokenizer(TEMPLATES[request.param], bos=request.param == "WITH_BOS")


def test_windows_give_what_every_prefix_gives(templated):
    rng, refused = random.Random(templated.chat_template), 0
    for _ in range(CASES):
        chat, turns = chat_and_turns(random_chat(rng, rng.randint(6, 40)), templated)
        expected = outcome(every_prefix, chat, turns)
        assert outcome(sequences.find_sequences, chat, turns) == expected
        refused += expected is None
    always = templated.chat_template in (CHANGES_HISTORY, KEEPS_THE_END)
    assert refused < CASES or always


@pytest.mark.parametrize("name", TEMPLATES)
def test_windows_are_used_where_they_fit(name, monkeypatch):
    """So that the test above compares two ways."""
    tokenizer = build_tokenizer(TEMPLATES[name], bos=name == "WITH_BOS")
    reply = "A" if name in LOCAL else "<think>so</think>A"
    record = chat(*["a?", reply, "b?", "B"] * 20)
    long, turns = chat_and_turns(record, tokenizer)
    calls = []
    render = Chat.render_messages
    monkeypatch.setattr(
        Chat,
        "render_messages",
        lambda self, part, **options: (
            calls.append(len(part)) or render(self, part, **options)
        ),
    )
    text = long.render(len(long.messages))
    try:
        sequence = sequences._in_windows(long, turns, text)
    except NoTrainableTokens:
        sequence = None
    assert (sequence is not None) == (name in LOCAL)
    if name in LOCAL:
        assert len(sequence.spans) == len(turns)
        assert sum(calls) < 3_000  # every prefix: 80 renderings, 40 messages each


def test_long_chat_takes_seconds():
    """2,000 turns took 102 s and 4.6 GB when every prefix was encoded."""
    tokenizer = build_tokenizer(TRIMS)
    record = chat(*["how are you?", "I am fine, thank you."] * 1_000)
    start = time.process_time()
    example = encode_one(record, tokenizer, max_seq_length=1 << 20)
    assert time.process_time() - start < 15
    texts = trained_texts(example, tokenizer)
    assert texts == ["I am fine, thank you.<|im_end|>"] * 1_000


def test_chat_too_long_for_its_template_is_skipped(monkeypatch):
    tokenizer = build_tokenizer(COUNTS_TURNS)
    record = chat(*["a?", "A"] * 40)
    encode_one(record, tokenizer, max_seq_length=9999)
    monkeypatch.setattr(sequences, "MAX_CHARACTERS", 1_000)
    with pytest.raises(NoTrainableTokens, match="the chat has 40 turns and"):
        sequences.find_sequences(*chat_and_turns(record, tokenizer))


def test_edges_need_the_tokens_of_the_text_before_them_alone():
    """A space goes to the next word, so the edge after it has other tokens alone."""
    tokenizer = build_tokenizer(CHATML)
    text = "<|im_start|>user thinking<|im_end|> user"
    before, inside = text.index(" thinking"), text.index("thinking")
    for edge, found in ((before, True), (inside, False)):
        [encoded] = encode_with_edges([(text, [edge])], tokenizer)
        assert (None not in encoded.edges) == found


def test_windows_take_no_white_space_of_the_next_message():
    """A header ends the turn only if it follows at once, as for a single turn."""
    template = (
        "{% for m in messages %}{{ '\n<|im_start|>' + m.role + ':' + m.content }}"
        "{% endfor %}{{ '\n<|im_start|>assistant:' if add_generation_prompt }}"
    )
    tokenizer = build_tokenizer(template)
    tokenizer.eos_token = "<|im_start|>"
    long, turns = chat_and_turns(chat(*["a?", "A"] * 40), tokenizer)
    found = sequences.find_sequences(long, turns)
    assert len(found) == 40
    for sequence in found:
        [(start, end)] = sequence.spans
        assert (sequence.text[start:end], sequence.add_eos) == ("A", True)
