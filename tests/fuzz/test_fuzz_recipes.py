"""Mutated recipes and overrides are loaded and planned, or refused with a message."""

import random
import time

import pytest
from lmx.config import bundled, json_schema
from lmx.errors import UserError
from lmx.pipeline.plan import load, plan

MAX_SECONDS, MAX_LINE = 2.0, 1000
SCALARS = [
    *("", "null", "~", "yes", "NaN", ".inf", "-.inf", "1e400", "0x1F", "0o17", "1_000"),
    *("-1", "0", "1.5", "9" * 40, "1e-400", "'", '"', "[", "{", "]", "&a *a", "*b"),
    *("!!python/object:os.system x", "!!binary aGk=", "!!set {a}", "<<: *a", "? [a]"),
    *("2026-11-24", "12:30:45", "|", ">-", "%TAG", "---", "...", "\t", "\x00"),
    *("\xed\xa0\x80", "\u202e", "\x1b[2J", "a" * 9000),
    *("data/tiny-base", "..", "/", "~nobody", "a/b/c", "builtin:stdlib", "builtin:x"),
    *("[1, 2, 3]", "{a: 1}", "{bits: 4}", "[[[[[[[[]]]]]]]]", "{type: dpo}", "[null]"),
]
KEYS = [
    *("model", "stages", "train", "quantize", "method", "type", "bits", "qat", "loss"),
    *("adapter", "path", "tracker", "python", "seed", "output", "data", "steps", "x"),
]


def mutate_line(rng: random.Random, line: str) -> str:
    """A line with another key, value or indentation, or with other characters."""
    draw = rng.random()
    key, colon, value = line.partition(":")
    if draw < 0.35 and colon:
        return f"{key}: {rng.choice(SCALARS)}"
    if draw < 0.5 and colon:
        indent = key[: len(key) - len(key.lstrip(" -"))]
        return f"{indent}{rng.choice(KEYS)}:{value}"
    if draw < 0.6:
        return " " * rng.choice([1, 2, 3, 8]) + line
    if draw < 0.7:
        return line.lstrip()
    place = rng.randrange(len(line) + 1)
    if draw < 0.85:
        return line[:place] + rng.choice(SCALARS)[:50] + line[place:]
    return line[:place] + line[place + rng.randrange(1, 9) :]


def mutate_text(rng: random.Random, text: str) -> str:
    lines = text.splitlines()
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        draw, index = rng.random(), rng.randrange(len(lines))
        if draw < 0.6:
            lines[index] = mutate_line(rng, lines[index])
        elif draw < 0.7 and len(lines) > 1:
            del lines[index]
        elif draw < 0.8:
            lines.insert(index, lines[rng.randrange(len(lines))])
        elif draw < 0.9:
            start = min(index, len(lines) - 1)
            lines[start : start + 3] = rng.sample(
                lines[start : start + 3], len(lines[start : start + 3])
            )
        else:
            lines.insert(index, f"{rng.choice(KEYS)}: {rng.choice(SCALARS)}")
    return "\n".join(lines)


def overrides(rng: random.Random) -> list[str]:
    """Arguments after the recipe, most of them wrong."""
    count = rng.choice([0, 0, 1, 2])
    names = ["stages.train.steps", "stages.1.train.qat.bits", "data.train", "seed"]
    names += ["model", "stages.9.x", "", "stages", "stages.train.adapter", "a.b.c.d"]
    return [f"{rng.choice(names)}={rng.choice(SCALARS)}" for _ in range(count)]


def check(case: int, path, arguments: list[str]) -> bool:
    """Whether the recipe is valid."""
    start = time.process_time()
    try:
        loaded = load(path, arguments)
        plan(loaded)
        message, is_valid = "", True
    except UserError as error:
        message, is_valid = str(error), False
    seconds = time.process_time() - start
    assert seconds < MAX_SECONDS, f"case {case}: {seconds:.1f} s"
    longest = max(map(len, message.splitlines()), default=0)
    assert longest <= MAX_LINE, f"case {case}: a line of {longest} characters"
    return is_valid


def test_mutated_recipes(num_cases, fuzz_random, tmp_path, monkeypatch):
    monkeypatch.chdir(bundled.BUNDLED)
    texts = [p.read_text() for p in bundled.bundled_recipes().values()]
    path, valid = tmp_path / "mutated.yaml", 0
    count = num_cases(300)
    for case in range(count):
        text = mutate_text(fuzz_random, fuzz_random.choice(texts))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            valid += check(case, path, overrides(fuzz_random))
        except UserError:
            raise
        except Exception as error:
            pytest.fail(f"case {case}: {error!r}\n{text[:3000]}")
    # Some mutations change nothing that matters, most do.
    assert 0 < valid < count


NUMBERS = [
    *("1.0e308", "-1.0e308", "1.0e-323", ".inf", "9" * 400, "9" * 5000, "4294967295"),
    *("4.2e9", "٣", "3٣h", "³", "1" + "0" * 18, f"{'9' * 400}h", "[1.0e308, 9]"),
]
# A recipe with a stage, in which a key is set.
STAGES = {"train": "{batch_size: 2, steps: 2}", "draft": "{}", "evaluate": "{}"}
STAGES["quantize"] = "{method: gptq}"


def is_number(node: dict) -> bool:
    """Whether a key of the schema may be a number, or a list of numbers."""
    choices = json_schema.alternatives(node)
    choices += [node["items"] for node in choices if "items" in node]
    return any(node.get("type") in ("integer", "number") for node in choices)


def test_numbers_of_every_key(num_cases, fuzz_random, tmp_path, monkeypatch):
    monkeypatch.chdir(bundled.BUNDLED)
    path, valid = tmp_path / "numbers.yaml", 0
    addresses = {
        f"{section}.{key}".lstrip(".")
        for section, schemas in json_schema.sections().items()
        for schema in schemas
        for key, node in schema["properties"].items()
        if "from_scratch" not in section and "<" not in section and is_number(node)
    }
    assert {"seed", "stages.train.epochs", "stages.draft.budget"} <= addresses
    cases = sorted(addresses) * max(1, num_cases(300) // len(addresses))
    for case, address in enumerate(cases):
        _, _, kind = address.rpartition("stages.")
        kind = kind.partition(".")[0]
        kind = kind if kind in STAGES else "train"
        path.write_text(
            "model: data/tiny-base\ndata: {train: data/commands/train.jsonl}\n"
            f"stages:\n  - {kind}: {STAGES[kind]}\n"
        )
        arguments = [f"{address}={fuzz_random.choice(NUMBERS)}"]
        if address == "stages.train.epochs":
            arguments.append("stages.train.steps=null")
        try:
            if check(case, path, arguments):
                valid += 1
                [stage] = load(path, arguments).recipe.stages
                if kind == "train":
                    assert stage.config.num_steps(10**6, 1.0) > 0
                elif kind == "draft":
                    assert stage.config.num_steps != 0
                elif kind == "quantize" and stage.config.mixed_precision:
                    assert stage.config.mixed_precision.max_bytes(10**12) > 0
        except UserError:
            raise
        except Exception as error:
            pytest.fail(f"{arguments}: {error!r}")
    assert 0 < valid < len(cases)
