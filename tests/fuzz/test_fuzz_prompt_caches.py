"""Damaged prompt caches are refused with a message, and never used in part.

A mutated file with a new hash is what a program could write. It is used or refused; a
chat goes on from it without a traceback.
"""

import json
import random
import shutil
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
from forked_cases import TESTS, run_cases
from json_mutations import damage_bytes, dump_json, mutate_json, replace_file

sys.path.append(str(TESTS / "generation"))
from lmx.errors import UserError
from lmx.files.hashes import hash_file
from lmx.generation.generator import Generator
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.prompt_cache import (
    ARRAYS_FILE,
    METADATA_FILE,
    SavedPrompts,
    load_prompt_cache,
    save_prompt_cache,
)
from lmx.generation.kv_cache.sequence import CacheState
from tiny_families import VOCABULARY, member
from tiny_generators import byte_tokenizer

# Full attention, a window, a recurrent state, a latent: every kind of state.
FAMILIES = ("llama", "gemma3", "qwen3_next", "deepseek_v3")
TOKENS = [7 * n % VOCABULARY for n in range(1, 24)]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hé"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}a:"


@cache
def model_of(family: str):
    return member(family).eval()


@cache
def prompt_cache(family: str) -> Path:
    """The folder of a prompt cache that is whole."""
    prefixes, folder = PrefixCache(1 << 30), Path(TemporaryDirectory().name)
    # A tree with two ends.
    for tokens in (TOKENS, [*TOKENS[:9], 1, 2, 3]):
        state = CacheState(model_of(family))
        state.forward(mx.array([tokens]))
        prefixes.insert(tokens, state)
    options = {"kinds": state.kinds, "digest": "d", "messages": CHAT}
    save_prompt_cache(prefixes, folder, **options)
    return folder


@cache
def continuation(family: str) -> list[int]:
    generator = Generator(model_of(family), byte_tokenizer())
    return generator.generate([*TOKENS, 3], max_tokens=3, stop_tokens=()).tokens


def mutate_arrays(rng: random.Random, file: Path) -> None:
    """Write arrays with other values, shapes, types or names."""
    arrays = dict(mx.load(str(file)))
    name = rng.choice(sorted(arrays))
    value = arrays.pop(name)
    kind = rng.choice(["drop", "rename", "cut", "wide", "type", "nan", "flat", "swap"])
    if kind == "rename":
        arrays[rng.choice(["0", "9.9", "0.0.0", "", name + ".0"])] = value
    elif kind == "cut":
        axis = rng.randrange(value.ndim)
        arrays[name] = mx.take(value, mx.arange(value.shape[axis] - 1), axis=axis)
    elif kind == "wide":
        arrays[name] = mx.concatenate([value, value], axis=rng.randrange(value.ndim))
    elif kind == "type":
        types = [mx.int32, mx.float16, mx.uint8, mx.bool_]
        arrays[name] = value.astype(rng.choice(types))
    elif kind == "nan":
        arrays[name] = mx.full(value.shape, float("nan"))
    elif kind == "flat":
        arrays[name] = value.reshape(-1)
    elif kind == "swap" and arrays:
        other = rng.choice(sorted(arrays))
        arrays[name], arrays[other] = arrays[other], value
    mx.save_safetensors(str(file), arrays)


def damage(rng: random.Random, folder: Path) -> bool:
    """Change a prompt cache; returns whether it got a new hash."""
    arrays, metadata = folder / ARRAYS_FILE, folder / METADATA_FILE
    kind = rng.choice(["json"] * 4 + ["bytes"] * 2 + ["file", "arrays", "signed"])
    if kind == "bytes":
        file = rng.choice([arrays, metadata])
        file.write_bytes(damage_bytes(rng, file.read_bytes()))
    elif kind == "file":
        replace_file(rng, rng.choice([arrays, metadata]))
    elif kind == "json":
        dump_json(metadata, mutate_json(rng, json.loads(metadata.read_text())))
    else:
        mutate_arrays(rng, arrays)
        return kind == "signed" and sign(rng, folder)
    return False


def sign(rng: random.Random, folder: Path) -> bool:
    """Write the hashes of changed arrays and metadata, if they are well-formed."""
    file = folder / METADATA_FILE
    content = json.loads(file.read_text())
    prompt = content["prompts"] | {"arrays_sha256": hash_file(folder / ARRAYS_FILE)}
    if rng.random() < 0.5:
        mutated = mutate_json(rng, prompt)
        prompt = mutated if isinstance(mutated, dict) else prompt
    try:
        content["sha256"] = SavedPrompts.model_validate(prompt).sha256
    except ValueError:
        return False
    dump_json(file, content | {"prompts": prompt})
    return True


def run_case(seed: str) -> str:
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    with TemporaryDirectory() as parent:
        folder = Path(parent) / "cache"
        shutil.copytree(prompt_cache(family), folder)
        is_signed = damage(rng, folder)
        return outcome(family, folder, is_signed=is_signed)


def outcome(family: str, folder: Path, *, is_signed: bool) -> str:
    prefixes = PrefixCache(1 << 30)
    tokenizer = byte_tokenizer(template=TEMPLATE)
    generator = Generator(model_of(family), tokenizer, prefix_cache=prefixes)
    new_cache = generator.engine.new_cache
    try:
        saved = load_prompt_cache(prefixes, folder, new_cache=new_cache, digest="d")
        generator.encode_chat(saved.messages)
        prompt = [*TOKENS, 3]
        tokens = generator.generate(prompt, max_tokens=3, stop_tokens=()).tokens
        ends = [node.tokens.tolist() for node in prefixes.nodes() if not node.children]
        for end in ends:
            generator.generate([*TOKENS[:9], *end], max_tokens=2, stop_tokens=())
    except UserError:
        return "refused"
    if not is_signed:
        assert saved.messages == CHAT
        assert tokens == continuation(family)
        return "unchanged"
    return "signed"


def test_damaged_prompt_caches_are_refused(num_cases, fuzz_random):
    seeds = [str(fuzz_random.random()) for _ in range(num_cases(200))]
    outcomes = run_cases("test_fuzz_prompt_caches", seeds)
    assert outcomes["refused"] > 0.8 * len(seeds)
    assert outcomes["unchanged"] < 0.1 * len(seeds)
