"""Completions that follow a grammar, and the forms in which requests name one."""

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random

import mlx.core as mx
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from lmx.errors import UserError
from lmx.generation.engine import Engine
from lmx.generation.generator import Generator
from lmx.generation.grammar import ANY_OBJECT, Grammar, parse_response_format
from lmx.generation.grammar_matcher import GrammarCompiler, allow_only
from lmx.generation.sampling import Sampling
from lmx.generation.sequence import GenerationRequest
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.draft_model import draft_model_proposer
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer
from lmx.installation import install_command
from tiny_generators import VOCABULARY, byte_tokenizer, tiny
from tiny_requests import run

TOKENIZER = byte_tokenizer()
(STOP,) = TOKENIZER.eos_token_ids
OTHER_STOP = STOP + 1
COMPILER = GrammarCompiler(TOKENIZER)
FIXED = DraftLengthController(fixed=3)
CALL = {
    "type": "object",
    "properties": {
        "room": {"enum": ["kitchen", "den", "hall"]},
        "level": {"type": "integer", "minimum": 0, "maximum": 100},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["room", "level", "note"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar.json_schema(CALL),
    Grammar("regex", "(ab|c[0-9]{2}){1,6}!"),
    Grammar.choice(["the lamp is on", "the lamp is off", "no"]),
    Grammar("lark", 'start: "(" start ")" | "x"'),
]


def decoded(tokens):
    return TOKENIZER.decode([t for t in tokens if t not in (STOP, OTHER_STOP)])


class Schemas:
    """Random schemas whose texts are short, so that a random model ends them."""

    def __init__(self, seed):
        self.random = Random(seed)

    def schema(self):
        definitions = {name: self.value(1) for name in "AB"}
        return self.object(3) | {"$defs": definitions}

    def value(self, depth):
        kinds = [self.string, self.integer, self.number, self.enum, self.other]
        if depth:
            kinds += [self.object, self.array, self.any_of]
        if depth > 1:
            kinds.append(lambda _: {"$ref": f"#/$defs/{self.random.choice('AB')}"})
        return self.random.choice(kinds)(depth - 1)

    def object(self, depth):
        names = self.random.sample(["id", "name", "tag list", "ä", "x"], 3)
        return {
            "type": "object",
            "properties": {name: self.value(depth) for name in names},
            "required": names[: self.random.randrange(4)],
            "additionalProperties": False,
        }

    def array(self, depth):
        low, more = self.random.randrange(3), self.random.randrange(3)
        items = {"items": self.value(depth), "minItems": low, "maxItems": low + more}
        return {"type": "array"} | items

    def any_of(self, depth):
        return {"anyOf": [self.value(depth), self.value(depth)]}

    def string(self, _):
        low = self.random.randrange(3)
        if low == 2:
            return {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]$"}
        return {"type": "string", "minLength": low, "maxLength": low + 3}

    def integer(self, _):
        low = self.random.randint(-200, 200)
        bounds = {"minimum": low, "exclusiveMaximum": low + self.random.randint(1, 999)}
        return {"type": "integer"} | bounds

    def number(self, _):
        low = self.random.uniform(-10, 10)
        return {"type": "number", "minimum": low, "maximum": low + 2}

    def enum(self, _):
        return {"enum": self.random.sample(["on", "off", 7, None, True, [1], "é"], 3)}

    def other(self, _):
        return self.random.choice(
            [{"type": "boolean"}, {"type": ["null", "integer"], "maximum": 99}]
        )


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def request(grammar=None, max_tokens=400, sampling=None, prompt=(7, 8, 9), **options):
    compiled = grammar and COMPILER.compile(grammar)
    options = {"stop_tokens": {STOP}, "grammar": compiled} | options
    sampling = sampling or Sampling(1.0)
    return GenerationRequest(list(prompt), max_tokens, sampling, **options)


def mixed_requests():
    """Requests with and without grammars, greedy and sampled, of several lengths."""
    draw = np.random.default_rng(0)
    settings = [
        Sampling(),
        Sampling(1.0, seed=1),
        Sampling(0.8, top_p=0.9, top_k=40, seed=2),
        Sampling(1.0, frequency_penalty=0.3, repetition_penalty=1.2, seed=3),
    ]
    return [
        request(
            grammar,
            int(draw.integers(30, 90)),
            sampling,
            draw.integers(1, 250, int(draw.integers(1, 30))).tolist(),
        )
        for grammar in [*GRAMMARS, None]
        for sampling in settings
    ]


def is_valid(text, schema):
    try:
        return Draft202012Validator(schema).is_valid(json.loads(text))
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("count", "drafts"),
    [
        (10, False),
        pytest.param(100, False, marks=pytest.mark.slow),
        pytest.param(100, True, marks=pytest.mark.slow),
    ],
)
def test_completions_are_valid_under_random_schemas(llama, count, drafts):
    schemas = [Schemas(seed).schema() for seed in range(count)]
    make = (lambda _: lookup()) if drafts else None
    results = []
    for constrained in (True, False):
        requests = [
            request(
                Grammar.json_schema(schema) if constrained else None,
                900 if constrained else 60,
                Sampling(1.0, seed=seed),
            )
            for seed, schema in enumerate(schemas)
        ]
        engine = Engine(llama, make_proposer=make, draft_length=FIXED)
        completions = run(engine, requests)
        ended = [tokens[-1] == STOP for tokens in completions]
        valid = [
            is_valid(decoded(tokens), schema)
            for tokens, schema in zip(completions, schemas, strict=True)
        ]
        results.append((sum(ended), sum(valid)))
        if constrained:
            assert valid == ended
    assert results[0][0] >= 0.95 * count  # a random model may go on with digits
    assert results[1][1] == 0


def lookup():
    return PromptLookupProposer(NGramIndex(), min_probability=0.0)


def test_a_completion_that_is_cut_is_the_beginning_of_a_valid_one(llama):
    grammar = Grammar.json_schema(CALL)
    for count in (1, 5, 20):
        (tokens,) = run(Engine(llama), [request(grammar, count)])
        assert len(tokens) == count
        matcher = COMPILER.compile(grammar).start({STOP})
        assert not any(matcher.advance(token) for token in tokens)
        assert matcher.masks([], VOCABULARY).any()
    wrong = COMPILER.compile(grammar).start({STOP})
    assert wrong.advance(tokens[-1] + 1)


@pytest.fixture(scope="module")
def expected(llama):
    return [run(Engine(llama), [each])[0] for each in mixed_requests()]


@pytest.mark.parametrize(("name", "seed"), [("none", None), ("lookup", 1), ("same", 3)])
def test_tokens_are_those_of_the_request_alone(llama, expected, name, seed):
    makers = {
        "none": lambda: None,
        "lookup": lambda: lambda _: lookup(),
        "same": lambda: draft_model_proposer(llama),
    }
    engine = Engine(llama, make_proposer=makers[name](), draft_length=FIXED)
    assert run(engine, mixed_requests(), seed=seed) == expected
    if name != "none":
        assert engine.stats.rounds


def test_preempted_requests_keep_their_place_in_the_grammar(llama):
    def requests():
        return [request(GRAMMARS[0], 90, Sampling(1.0, seed=i)) for i in range(4)]

    expected = run(Engine(llama), requests())
    per_token = sum(Engine(llama).new_cache().bytes_by_capacity().values())
    engine = Engine(llama, kv_memory=int(210 * per_token))
    assert run(engine, requests()) == expected
    assert engine.preemptions


@pytest.mark.parametrize(("make", "neighbours"), [(None, 0), (lambda _: lookup(), 1)])
def test_processed_logprobs_are_those_of_allowed_tokens(llama, make, neighbours):
    values = {}
    for kind in ("processed", "raw"):
        engine = Engine(llama, make_proposer=make, draft_length=FIXED)
        others = [request(None, 20, prompt=[3]) for _ in range(neighbours)]
        only = request(Grammar.choice(["abababab"]), logprobs=kind)
        for each in (only, *others):
            engine.add_request(each)
        outputs = [o for _ in range(40) if not engine.idle for o in engine.step()]
        values[kind] = [o.logprob for o in outputs if o.request is only]
    assert values["processed"] == pytest.approx([0.0] * 9, abs=1e-6)
    assert max(values["raw"]) < -0.1


class Breaking:
    """A matcher of llguidance that raises at its fifth mask."""

    def __init__(self, matcher, left=5):
        self.matcher, self.left = matcher, left

    def __getattr__(self, name):
        return getattr(self.matcher, name)

    def deep_copy(self):
        return Breaking(self.matcher.deep_copy(), self.left)

    def compute_bitmask(self):
        self.left -= 1
        if not self.left:
            raise RuntimeError("a limit")
        return self.matcher.compute_bitmask()


@pytest.mark.parametrize("drafts", [False, True])
def test_a_grammar_that_fails_ends_its_request_only(llama, expected, drafts):
    make = (lambda _: lookup()) if drafts else None
    engine = Engine(llama, make_proposer=make, draft_length=FIXED)
    compiled = COMPILER.compile(GRAMMARS[0])
    broken = request(grammar=None, prompt=[1, 2])
    broken.grammar = replace(compiled, matcher=Breaking(compiled.matcher))
    requests = mixed_requests()
    tokens, errors = {each: [] for each in requests}, []
    for each in [*requests[:3], broken, *requests[3:]]:
        engine.add_request(each)
    while not engine.idle:
        for output in engine.step():
            if output.error:
                errors.append((output.request, str(output.error)))
            elif output.request is not broken:
                tokens[output.request].append(output.token)
    assert errors == [(broken, "grammar: it failed: a limit")]
    assert list(tokens.values()) == expected


def test_masks_follow_a_draft_as_far_as_the_grammar_takes_it():
    encode = lambda text: TOKENIZER.encode(text, add_special_tokens=False)  # noqa: E731
    matcher = COMPILER.compile(Grammar("regex", "ab?")).start({OTHER_STOP})

    def masks(draft, vocab_size=VOCABULARY):
        bits = np.unpackbits(
            matcher.masks(draft, vocab_size).view(np.uint8), axis=1, bitorder="little"
        )
        return [np.flatnonzero(row).tolist() for row in bits]

    (a, b), others = encode("ab"), list(range(288))
    assert masks([]) == [[a]]
    # Only the stop token of the request ends it, and the bits are those of the model.
    assert masks([a, b, b]) == [[a], [b, OTHER_STOP], [OTHER_STOP]]
    assert masks([a, OTHER_STOP, b]) == [[a], [b, OTHER_STOP], others]
    assert masks([b]) == masks([STOP]) == [[a]]
    assert masks([a], 1000) == [[a], [b, OTHER_STOP]]
    assert matcher.advance(a) is None
    assert masks([]) == [[b, OTHER_STOP]]
    assert not matcher.error
    assert masks([], b) == [list(range(96))]  # a model that has no token for it
    assert "no token of the model" in str(matcher.error)


def test_rows_without_a_grammar_keep_their_logits():
    logits = mx.random.normal((2, 3, 70))
    mask = np.array([[2, 0, 1 << 5], [0, 1, 0]], np.uint32)
    out = np.array(allow_only(logits, [None, mask]))
    assert (out[0] == np.array(logits)[0]).all()
    assert (out[1, 2] == np.array(logits)[1, 2]).all()
    finite = np.argwhere(np.isfinite(out[1, :2]))
    assert finite.tolist() == [[0, 1], [0, 69], [1, 32]]


BOMBS = {
    "repetition": Grammar("regex", "(a{1000}){1000}"),
    "nested plus": Grammar("regex", "(a+)+" * 500),
    "parentheses": Grammar("regex", "(" * 20000 + "a" + ")" * 20000),
    "ambiguous": Grammar(
        "lark",
        "\n".join(
            [f"{'start' if not i else f'r{i}'}: r{i + 1} r{i + 1}" for i in range(60)]
        )
        + '\nr60: "x"',
    ),
    "endless": Grammar.json_schema({"$ref": "#"}),
    "properties": Grammar.json_schema(
        ANY_OBJECT | {"properties": {f"k{i}": {"type": "integer"} for i in range(2000)}}
    ),
    "intersections": Grammar.json_schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"{i}{j}": True}} for j in range(4)]}
                for i in range(12)
            ]
        }
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_hostile_grammars_are_refused_at_once(name):
    start = time.perf_counter()
    with pytest.raises(UserError):
        COMPILER.compile(BOMBS[name])
    assert time.perf_counter() - start < 5


def assert_matches(pattern, error):
    assert re.search(pattern, str(error)), str(error)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (
            Grammar.json_schema({"type": "text"}),
            "the JSON schema is refused: Invalid type",
        ),
        (Grammar.json_schema({"format": "colour"}), "Unknown format"),
        (Grammar.json_schema({"enum": []}), "Unsatisfiable"),
        (Grammar.json_schema({"$ref": "http://x.org/y"}), "x.org"),
        (Grammar.json_schema({"multipleOf": 0}), "multiple of"),
        (Grammar("regex", "(a"), "the regular expression is refused.*unclosed"),
        (Grammar("regex", "a(?=b)"), "look-ahead"),
        (Grammar("regex", "\ud800"), "the regular expression"),
        (Grammar("lark", "start: a"), "grammar: the grammar is refused"),
    ],
)
def test_grammars_that_do_not_compile_are_refused(grammar, message):
    with pytest.raises(UserError) as caught:
        COMPILER.compile(grammar)
    assert_matches(message, caught.value)


def test_grammars_are_compiled_once(monkeypatch):
    compiler = GrammarCompiler(TOKENIZER)
    first = compiler.compile(GRAMMARS[0])
    assert compiler.compile(Grammar.json_schema(json.dumps(CALL))) is first
    monkeypatch.setattr("lmx.generation.grammar_matcher.MAX_COMPILED", 2)
    for grammar in (GRAMMARS[1], GRAMMARS[0], GRAMMARS[2]):
        compiler.compile(grammar)
    assert compiler.compile(GRAMMARS[0]) is first
    compiler.compile(GRAMMARS[1])
    compiler.compile(GRAMMARS[2])
    assert compiler.compile(GRAMMARS[0]) is not first


def test_a_grammar_compiled_in_a_thread_serves_several_requests():
    with ThreadPoolExecutor(4) as pool:
        compiler = GrammarCompiler(TOKENIZER)
        grammars = [Grammar("regex", f"[ab]{{{n}}}") for n in range(1, 9)] * 4
        compiled = list(pool.map(compiler.compile, grammars))
        for count, each in enumerate(compiled[:8], 1):
            one, other = each.start({STOP}), each.start({STOP})
            for _ in range(count):
                assert one.advance(64) is None  # "a"
            assert one.advance(64)
            assert other.advance(64) is None


def test_without_llguidance_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match="llguidance") as caught:
        GrammarCompiler(TOKENIZER).compile(GRAMMARS[0])
    assert install_command("serve") == caught.value.hint


@pytest.mark.parametrize(
    "options",
    [{"stop_tokens": ()}, {"sampling": Sampling(allowed_tokens=(1, 2))}],
)
def test_settings_that_contradict_a_grammar_are_refused(options):
    with pytest.raises(UserError, match="grammar"):
        request(GRAMMARS[0], **options)


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar.json_schema({"type": "object"})),
        ({"type": "json_object", "schema": SCHEMA}, Grammar.json_schema(SCHEMA)),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            },
            Grammar.json_schema(SCHEMA),
        ),
        ({"type": "regex", "regex": "a+"}, Grammar("regex", "a+")),
        ({"type": "regex", "pattern": "a+"}, Grammar("regex", "a+")),
        ({"json": SCHEMA, "regex": None}, Grammar.json_schema(SCHEMA)),
        ({"json": json.dumps(SCHEMA)}, Grammar.json_schema(SCHEMA)),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"choice": ["a", 'b"']}, Grammar("lark", 'start: "a" | "b\\""')),
        ({"grammar": "start: /a/"}, Grammar("lark", "start: /a/")),
    ],
)
def test_forms_of_requests(value, expected):
    assert parse_response_format(value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("json", "response_format: expected an object"),
        ({"type": "json"}, "there is no type"),
        ({"type": ["x"]}, "there is no type"),
        ({"type": "text", "schema": {}}, "unknown key 'schema'"),
        ({"type": "json_schema"}, "response_format.json_schema: expected an object"),
        ({"type": "json_schema", "schema": {}}, "unknown key 'schema'"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "there is no schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"items": {"not": 1}}}},
            "response_format.json_schema.schema.items: the keyword 'not'",
        ),
        (
            {"type": "json_schema", "json_schema": {"shema": {}}},
            "did you mean 'schema'",
        ),
        ({"type": "regex"}, "either regex or pattern"),
        ({"type": "regex", "regex": 3}, "response_format.regex: expected a text"),
        ({}, "expected type, or one of json, regex, choice, grammar"),
        ({"json": {}, "regex": "a"}, "expected type, or one of"),
        ({"choice": []}, "response_format.choice: expected a list of texts"),
        ({"choice": ["a", 3]}, "a list of texts"),
        ({"structural_tag": {}}, "unknown key 'structural_tag'"),
        ({"json": 3}, "response_format.json: a JSON schema is an object"),
        ({"grammar": 'start: "a" %json {"not": {}}'}, "grammar.%json: the keyword"),
        ({"grammar": 'start: %json {"x-guidance": {"lenient": true}}'}, "x-guidance"),
    ],
)
def test_wrong_forms_are_refused(value, message):
    with pytest.raises(UserError) as caught:
        parse_response_format(value)
    assert message in str(caught.value)


def test_a_generator_takes_a_grammar(llama):
    generator = Generator(llama, TOKENIZER)
    result = generator.generate([7], grammar=GRAMMARS[2], max_tokens=40)
    assert result.text in ("the lamp is on", "the lamp is off", "no")
    assert result.finish_reason == "stop"
    cut = generator.generate([7], grammar=GRAMMARS[1], max_tokens=1)
    assert cut.finish_reason == "length"
