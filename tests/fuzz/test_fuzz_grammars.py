"""Deep schemas, grammars and expressions compile or are refused; the process lives.

A native stack that overflows ends the process, so the cases run in others.
"""

import json
import random
import sys
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "generation"))

from forked_cases import run_cases

LINKS = [
    "@",
    '{"items": @}',
    '{"prefixItems": [@], "items": false}',
    '{"type": "object", "properties": {"x": @}, "required": ["x"]}',
    '{"anyOf": [@, {"type": "null"}]}',
    '{"allOf": [@]}',
    '{"patternProperties": {"a": @}}',
]
BODIES = ["@", "@?", "@*", '@ "a" | "b"', "@{2}", "~@", '"a"~2 @', "(@)", "@ @"]
REGEXES = ["(?:@)*", "(@|b)", "@?c", "(?:@){2}", "[a&&[@]]", "@&~(b)"]
COUNTS = [3, 50, 390, 500, 1000, 4000]
NUMBERS = [2**53 + 1, 2**63, -(2**63), 10**30, -(10**30), 1e300, 7]


def chain_of_schemas(count, link):
    """The text of definitions of which each refers to the next."""
    reference = '{{"$ref": "#/$defs/d{}"}}'
    definitions = [
        f'"d{i}": {link.replace("@", reference.format(i + 1))}' for i in range(count)
    ]
    last = f'"d{count}": {{"type": "null"}}'
    return f'{{"$defs": {{{", ".join([*definitions, last])}}}, "$ref": "#/$defs/d0"}}'


def chain_of_rules(count, body, letter="r"):
    """A Lark grammar whose rules or terminals name the next."""
    rules = [
        f"{letter}{i}: {body.replace('@', f'{letter}{i + 1}')}" for i in range(count)
    ]
    return "\n".join([f"start: {letter}0", *rules, f'{letter}{count}: "x"'])


def grammar_of(rng):
    """A random kind of grammar and its source."""
    kind, count = rng.choice(["json_schema", "lark", "regex"]), rng.choice(COUNTS)
    if kind == "regex":
        text = "a"
        for _ in range(min(count, rng.choice([5, 300]))):
            text = rng.choice(REGEXES).replace("@", text)
        return kind, text
    if kind == "lark":
        if rng.random() < 0.3:
            return kind, "start: %json " + chain_of_schemas(count, rng.choice(LINKS))
        return kind, chain_of_rules(count, rng.choice(BODIES), rng.choice("rR"))
    if rng.random() < 0.3:
        names = ["minimum", "maximum", "exclusiveMinimum", "const", "multipleOf"]
        schema = {name: rng.choice(NUMBERS) for name in rng.sample(names, 2)}
        return kind, json.dumps({"type": rng.choice(["integer", "number"])} | schema)
    return kind, chain_of_schemas(count, rng.choice(LINKS))


@cache
def compiler():
    from lmx.generation.grammar_matcher import GrammarCompiler
    from tiny_generators import byte_tokenizer

    return GrammarCompiler(byte_tokenizer())


def run_case(seed):
    kind, source = grammar_of(random.Random(seed))
    return try_grammar(kind, source)


def run_named(name):
    return try_grammar(*NAMED[name])


def try_grammar(kind, source):
    """ "refused" or "compiled"; then some tokens of a text."""
    from lmx.errors import UserError
    from lmx.generation.grammar import Grammar

    try:
        make = Grammar.json_schema if kind == "json_schema" else None
        grammar = make(source) if make else Grammar(kind, source)
        compiled = compiler().compile(grammar)
    except UserError:
        return "refused"
    matcher = compiled.start({1})
    for token in b"[[{aaaxx":
        if matcher.error or not matcher.masks([], 288).any():
            break
        matcher.advance(token)
    return "compiled"


NAMED = {
    **{
        f"schemas {link}": ("json_schema", chain_of_schemas(1000, link))
        for link in LINKS
    },
    "references": ("json_schema", chain_of_schemas(4000, "@")),
    "arrays": ("json_schema", chain_of_schemas(4000, LINKS[1])),
    "rules": ("lark", chain_of_rules(4000, "@")),
    "terminals": ("lark", chain_of_rules(4000, "@", "R")),
    "schema in a grammar": ("lark", "start: %json " + chain_of_schemas(4000, "@")),
    "64 bits": (
        "json_schema",
        json.dumps({"type": "integer", "minimum": -(10**31), "maximum": -(10**30)}),
    ),
    "-2^63": ("json_schema", json.dumps({"const": -(2**63)})),
}


def test_crashes_of_before():
    assert run_cases(__name__, sorted(NAMED), "run_named") == {"refused": len(NAMED)}


def test_deep_grammars(num_cases, fuzz_random):
    seeds = [str(fuzz_random.random()) for _ in range(num_cases(2000))]
    outcomes = run_cases(__name__, seeds)
    assert min(outcomes["compiled"], outcomes["refused"]) > len(seeds) / 10
