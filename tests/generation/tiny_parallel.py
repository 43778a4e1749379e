"""What the ranks of a tensor-parallel engine generate for the same requests."""

import json
from functools import partial
from pathlib import Path

import tiny_families
from lmx.config.quant_spec import KV_POLICIES
from lmx.errors import UserError
from lmx.generation import engine as engine_module
from lmx.generation import sampler
from lmx.generation.engine import Engine
from lmx.generation.grammar import Grammar
from lmx.generation.grammar_matcher import GrammarCompiler
from lmx.generation.kv_cache.eviction import KVLimit
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.parallel_engine import ParallelEngine
from lmx.generation.sampling import Sampling
from lmx.generation.sequence import GenerationRequest
from lmx.generation.speculative.dflash import DFlashProposer
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.draft_model import draft_model_proposer
from lmx.generation.speculative.eagle3 import Eagle3Proposer
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer
from lmx.interfaces import Communicator
from lmx.models import tensor_parallel
from tiny_dflash import random_drafter, random_target
from tiny_eagle3 import tiny_drafter
from tiny_generators import VOCABULARY, byte_tokenizer
from tiny_requests import noisy, run, some_requests
from tiny_shards import hold_wrong_part, model_of

TOKENIZER = byte_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER)
SAMPLED = [
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_p=0.9, seed=2**63 + 4, logit_bias=((5, 4.0),)),
    Sampling(temperature=0.8, frequency_penalty=0.3, seed=5),
    Sampling(temperature=0.8, allowed_tokens=tuple(range(5, 60)), seed=6),
]
DRAFTS = "lookup", "draft", "eagle3", "dflash"
ABORTED = (1, 4)


def target(family: str):
    """A model whose next token varies."""
    if family == "small":
        small, _ = random_target(num_key_value_heads=2, vocab_size=VOCABULARY)
        return small
    # Keys of 32 numbers can be quantized.
    sizes = {"head_dim": 32} if family in ("llama", "qwen3_next") else {}
    return noisy(model_of(family, vocab_size=VOCABULARY, **sizes), 0.05)


def requests(kind: str) -> list[GenerationRequest]:
    """Ragged prompts. Some begin alike, and one does not fit into a message."""
    chosen = SAMPLED if kind == "sampled" else [Sampling()]
    found = some_requests(6, chosen, VOCABULARY, longest=30)
    for request in found[2:4]:
        request.prompt = [*range(7, 70), *request.prompt]
    found[5].prompt = [*range(3, 200)]
    if kind == "grammar":
        regex = Grammar("regex", "(ab|c[0-9]{2}){1,6}!", exit=256)
        for request in found:
            request.min_tokens, request.prompt_logprobs = 6, True
        for request in found[::2]:
            request.stop_tokens = frozenset(TOKENIZER.eos_token_ids)
            request.grammar = COMPILER.compile(regex)
    return found


def options(kind: str, family: str, model) -> dict:
    """Those of an engine.

    Args:
        model: the target, or this rank's part of it.
    """
    chosen: dict = {"max_batch_size": 4, "prefill_step_size": 32}
    index = NGramIndex()
    if kind in ("lookup", "adaptive"):
        chosen["make_proposer"] = lambda _: PromptLookupProposer(index)
    if kind == "draft":
        chosen["make_proposer"] = draft_model_proposer(noisy(target(family), 0.01))
    if kind == "eagle3":
        drafter = tiny_drafter(model, vocab_size=VOCABULARY)
        chosen["make_proposer"] = lambda cache: Eagle3Proposer(drafter, cache)
    if kind == "dflash":
        dflash = random_drafter(model, tiny_families.config("llama"))
        chosen["make_proposer"] = lambda cache: DFlashProposer(dflash, cache)
    if kind in DRAFTS:
        chosen["draft_length"] = DraftLengthController(fixed=3)
    if kind == "kv_bits":
        chosen["kv_bits"] = 8
    if kind == "layer_bits":
        chosen["kv_bits"] = [4 + 4 * (layer % 4 == 1) for layer in range(7)]
    if kind in KV_POLICIES:
        chosen["kv_limit"] = KVLimit(40, kind)
    if kind == "evicted":
        chosen["prefix_cache"] = PrefixCache(1 << 19)
    return chosen


def expected(kind: str, family: str) -> list[list[int]]:
    """The tokens of one process."""
    model = target(family)
    chosen = {"prefix_cache": PrefixCache()} | options(kind, family, model)
    return run(Engine(model, **chosen), requests(kind), seed=1)


def generate(
    ranks: Communicator, folder: Path, family: str, fault: str, *kinds: str
) -> None:
    """Save the tokens of every kind of requests, and what else went on."""
    found: dict = {}
    if fault == "diverges" and not ranks.is_first:
        engine_module.sample_rows = other_tokens
    for kind in kinds:
        model = target(family)
        tensor_parallel.shard(model, ranks, partial(target, family))
        if fault == "wrong":
            hold_wrong_part(model, target(family), ranks.size)
        engine = ParallelEngine(
            model, ranks, COMPILER.compile, **options(kind, family, model)
        )
        try:
            if ranks.is_first:
                found[kind] = led(engine, kind)
            else:
                engine.follow()
        except UserError as error:
            found["error"] = error.message
        found[f"{kind} checksum"] = engine._checksum
        found[f"{kind} rounds"] = engine.stats.rounds
        prefixes = engine.prefixes
        nodes = [*prefixes.nodes()]
        found[f"{kind} prefixes"] = [len(node.tokens) for node in nodes]
        held = sum(node.nbytes for node in nodes)
        found[f"{kind} bytes"] = {"counted": prefixes.nbytes, "held": held}
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


def led(engine: ParallelEngine, kind: str) -> list[list[int]]:
    """The tokens of rank 0; then of a second run, of which some are aborted."""
    tokens = run(engine, requests(kind), seed=1)
    again = run(engine, requests(kind), seed=2, aborted=ABORTED)
    engine.close()
    for index, (first, second) in enumerate(zip(tokens, again, strict=True)):
        assert second == (first[: len(second)] if index in ABORTED else first)
    assert any(len(again[i]) < len(tokens[i]) for i in ABORTED)
    return tokens


def other_tokens(*arguments):
    """Samples that no other rank has."""
    return (sampler.sample_rows(*arguments) + 1) % VOCABULARY
