"""Mutated chat templates train a turn as it is served, or refuse it.

`test_chat_rendering.py` has templates that loop, or print and compute too much.
"""

import json
import random
import re
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from chat_oracle import Oracle, build_tokenizer, is_trained, served
from chat_rows import CHATS, HELLO, LONG, SYSTEM, TOOLS, assistant, call, result, user
from chat_templates import PLAIN
from chat_templates_channels import CHANNELS
from chat_templates_reasoning import REASONING
from chat_templates_tools import TOOLS as WITH_TOOLS
from forked_cases import run_cases
from lmx.data.dataset import RecordReader
from lmx.data.tokenization import encode_block
from lmx.errors import UserError

FAMILIES = list((PLAIN | WITH_TOOLS | REASONING | CHANNELS).values())
LITERAL = re.compile(r"'[^'\n]*'")
PIECES = (
    "{{- m.content }}",
    "{{- messages | length }}",
    "{{- '<think>\\n' if add_generation_prompt }}",
    "{{- '<think>\\n\\n</think>\\n\\n' }}",
    "{{- eos_token }}",
    "{{- loop.index }}",
    "{%- set messages = messages[-3:] %}",
    "{%- if loop.last %}{{- '!' }}{%- endif %}",
    "{{- 'a' * 3000 }}",
    "{{- m.content | upper }}",
    "{{- raise_exception('no') if loop.index > 3 }}",
    "{{- m.unknown.unknown }}",
)
WORDS = ("Ahoy", " sir", "\n\n", "two ", "{{ x }}", "é🙂", "  ", "</b>", "'", "<b>")


@cache
def tokenizer_of(number: int):
    return build_tokenizer(FAMILIES[number])


def mutate(rng: random.Random, template: str) -> str:
    """A template with one changed line or constant."""
    lines, draw = template.split("\n"), rng.random()
    printing = [n for n, line in enumerate(lines) if line.startswith("{{")]
    place = rng.choice(
        printing if printing and rng.random() < 0.7 else range(len(lines))
    )
    other = rng.choice(printing or [0])
    if draw < 0.2:
        del lines[place]
    elif draw < 0.35:
        lines[place], lines[other] = lines[other], lines[place]
    elif draw < 0.45:
        lines.insert(other, lines[place])
    elif draw < 0.65:
        lines.insert(place, rng.choice(PIECES))
    else:
        literals = LITERAL.findall(template) or ["''"]
        new = rng.choice([*literals, "''", r"'\n'", "' '", "'<think>'"])
        old = rng.choice(literals)
        return template.replace(old, new, rng.choice([1, -1]))
    return "\n".join(lines)


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randrange(5)))


def random_row(rng: random.Random) -> dict:
    """A chat with turns in any order."""
    messages = [SYSTEM] if rng.random() < 0.3 else []
    for number in range(rng.choice([2, 2, 4, 6, 6, 40])):
        draw = rng.random()
        if draw < 0.1:
            messages.append(result(number, "f", random_text(rng)))
        elif (draw < 0.85) == (number % 2 == 0):
            messages.append(user(random_text(rng)))
        else:
            turn = assistant(random_text(rng))
            if rng.random() < 0.3:
                # Whether white space alone is reasoning depends on the template.
                turn["reasoning_content"] = random_text(rng).strip()
            if rng.random() < 0.3:
                turn["tool_calls"] = [
                    call(number, "f", {"x": random_text(rng), "y": 7})
                ]
            messages.append(turn)
    if rng.random() < 0.7 or not any(map(is_trained, served({"messages": messages}))):
        messages += [HELLO, assistant("The last answer.")]
    return {"messages": messages} | ({"tools": TOOLS} if rng.random() < 0.3 else {})


def read(row: dict):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text(json.dumps(row), encoding="utf-8")
        return list(RecordReader(str(path)))


def encode(row: dict, tokenizer) -> list:
    """The examples of a row; none if it is refused."""
    try:
        result = encode_block(
            read(row), tokenizer, max_seq_length=1 << 20, loss_on="completions"
        )
    except UserError:
        return []
    assert not (result.examples and result.dropped)
    return result.examples


def run_case(seed: str) -> str:
    """Train some chats with one mutated template."""
    rng = random.Random(seed)
    number, outcomes = rng.randrange(len(FAMILIES)), set()
    template = FAMILIES[number].template
    for _ in range(rng.choice([1, 1, 2, 3])):
        template = mutate(rng, template)
    family, tokenizer = (
        replace(FAMILIES[number], template=template),
        tokenizer_of(number),
    )
    tokenizer.chat_template = template
    try:
        oracle = Oracle(family)
    # What Jinja cannot compile.
    except Exception:
        oracle = None
    for row in (random_row(rng), rng.choice([*CHATS.values(), LONG])):
        examples = encode(row, tokenizer)
        outcomes.add("trained" if examples else "refused")
        if examples:
            assert oracle, f"{template}\n{row}\ntrained without a template"
            problem = oracle.cell(row).judge(examples, tokenizer)
            assert not problem, f"{template}\n{row}\n{problem}"
    return " and ".join(sorted(outcomes))


def test_mutated_templates(num_cases, request):
    seed = request.config.getoption("--fuzz-seed")
    count = num_cases(160)
    outcomes = run_cases(__name__, [f"{seed} {case}" for case in range(count)])
    assert outcomes["trained"] + outcomes["refused and trained"] > count // 4
    assert outcomes["refused"] > count // 20
