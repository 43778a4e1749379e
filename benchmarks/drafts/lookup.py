"""Count what prompt lookup saves on repeated and on unrelated requests.

The target completes all requests of a set once, in one batch. Then lookup drafts along
these completions, request by request, with the texts of earlier requests and without.
So the counts do not depend on the machine. Sets: solutions, JSON extracts and samples
of GSM8K problems, three edits of each of 12 functions, and unrelated chats, code and
text. `--print-only` counts again.
"""

import argparse
import ast
import inspect
import json
import random
import statistics
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

MODULES = """textwrap shlex bisect heapq calendar difflib fnmatch glob gettext
statistics string random colorsys copy csv dis getopt html keyword linecache locale
mimetypes opcode optparse os pickletools platform plistlib posixpath pprint quopri re
reprlib sched shutil smtplib socket stat stringprep tabnanny tarfile tempfile timeit
token tokenize trace traceback types uuid wave weakref zipfile"""
EDITS = "Add type hints to", "Add a docstring to", "Rename the variables of"
CHATS = """Explain why the sky is blue.
Write a short letter to a friend about a trip to the sea.
What are three ways to save water at home?
Give me a recipe for a simple vegetable soup.
How does a bicycle stay upright?
Describe the life of a medieval blacksmith.
What is the difference between weather and climate?
Write a poem about an old lighthouse.
How can I prepare for a job interview?
Summarize the plot of Romeo and Juliet.
Name five famous bridges and one fact about each.
Explain to a child what a computer does."""
TUTOR = (
    "You are a careful math tutor. Solve the problem step by step. Write each step on "
    "its own line, and end with a line 'The answer is N.'"
)
EXTRACT = (
    'Extract the facts of this problem as JSON with the keys "people", "items", '
    '"numbers" and "question".\n\n'
)
CHARACTERS = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gsm8k", type=Path, required=True, help="test.jsonl")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--num-requests", type=int, help="of every set; default: all")
    parser.add_argument("--max-tokens", type=int, default=128, help="per completion")
    parser.add_argument("--print-only", action="store_true")
    arguments = parser.parse_args()
    if not arguments.print_only:
        _complete_sets(arguments)
    for path in sorted(arguments.folder.glob("*.json")):
        rows = json.loads(path.read_text())
        for shared in False, True:
            counts = list(_count(rows, arguments.num_draft_tokens, shared=shared))
            tokens, positions = (_mean(values) for values in zip(*counts, strict=True))
            texts = "earlier and own texts" if shared else "own text"
            print(f"{path.stem}, {texts}: {tokens} tokens, {positions} positions")


def _mean(values: Iterable[float]) -> str:
    values = list(values)
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.2f} ± {error:.2f}"


def _count(
    rows: list[tuple[list[int], list[int]]], num_draft_tokens: int, *, shared: bool
) -> Iterable[tuple[float, float]]:
    """Tokens and verified positions per forward pass, of every request."""
    from lmx.generation.speculative.prompt_lookup import (
        NGramIndex,
        PromptLookupProposer,
    )
    from lmx.generation.speculative.proposer import accepted_tokens

    index = NGramIndex()
    for prompt, completion in rows:
        lookup = PromptLookupProposer(index if shared else None)
        end, passes, positions = 1, 0, 0
        while end < len(completion):
            limit = min(num_draft_tokens, len(completion) - end - 1)
            context = [*prompt, *completion[:end]]
            draft = lookup.propose(context, limit, None).tolist()
            end += accepted_tokens(draft, completion[end:]) + 1
            passes += 1
            positions += len(draft) + 1
        if passes:
            yield (len(completion) - 1) / passes, positions / passes


def _complete_sets(arguments: argparse.Namespace) -> None:
    from lmx import cpu

    cpu.enable()
    from lmx.generation.generator import Generator
    from lmx.generation.sampling import Sampling
    from lmx.models.loader import load

    arguments.folder.mkdir(parents=True, exist_ok=True)
    target = load(arguments.model)
    generator = Generator(target.model, target.tokenizer, max_batch_size=40)
    for name, requests in _sets(arguments, generator).items():
        requests = requests[: arguments.num_requests]
        path = arguments.folder / f"{name}.json"
        if path.exists():
            continue
        print(name, file=sys.stderr, flush=True)
        completions = generator.generate_all(
            [
                generator.request(
                    prompt,
                    max_tokens=min(max_tokens, arguments.max_tokens),
                    sampling=Sampling(0.7 if seed else 0.0, seed=seed),
                )
                for prompt, max_tokens, seed in requests
            ]
        )
        rows = [
            (list(map(int, prompt)), result.tokens)
            for (prompt, *_), result in zip(requests, completions, strict=True)
        ]
        path.write_text(json.dumps(rows))


def _sets(
    arguments: argparse.Namespace, generator
) -> dict[str, list[tuple[list[int], int, int]]]:
    """Prompts, numbers of tokens, and seeds of samples or 0, by set."""

    def chat(text: str, system: str | None = None) -> list[int]:
        messages = [{"role": "system", "content": system}] if system else []
        return generator.encode_chat([*messages, {"role": "user", "content": text}])

    lines = arguments.gsm8k.read_text().splitlines()
    problems = [json.loads(line)["question"] for line in lines]
    first, second, third = (
        random.Random(seed).sample(problems, count)
        for seed, count in enumerate((40, 40, 8))
    )
    functions = _functions()
    text = arguments.text.read_text()
    starts = range(0, len(text) - CHARACTERS, CHARACTERS)
    parts = [text[s : s + CHARACTERS] for s in random.Random(0).sample(starts, 12)]
    code = [function[: len(function) // 2] for function in functions[12:24]]
    return {
        "solutions": [(chat(problem, TUTOR), 96, 0) for problem in first],
        "json": [
            (chat(EXTRACT + problem, "Answer with JSON only."), 96, 0)
            for problem in second
        ],
        "edits": [(chat(_edit(e, f)), 128, 0) for f in functions[:12] for e in EDITS],
        "samples": [
            (chat(problem, TUTOR), 64, 1 + seed)
            for problem in third
            for seed in range(4)
        ],
        "chats": [(chat(text), 64, 0) for text in CHATS.splitlines()],
        "code": [(generator.encode_text(part), 64, 0) for part in code],
        "text": [(generator.encode_text(part), 64, 0) for part in parts],
    }


def _edit(edit: str, function: str) -> str:
    ending = " to longer names" if edit.startswith("Rename") else ""
    return (
        f"{edit} this function{ending}. Answer with the whole function only.\n\n"
        f"```python\n{function}\n```"
    )


def _functions() -> list[str]:
    """Functions of 250 to 700 characters from the standard library."""
    found = []
    for name in MODULES.split():
        source = inspect.getsource(import_module(name))
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                text = ast.get_source_segment(source, node)
                found += [text] if 250 <= len(text) <= 700 else []
    random.Random(0).shuffle(found)
    return found


if __name__ == "__main__":
    main()
