"""Prefixes on the disk: bounded, keyed, never damaged; they outlive a process."""

from functools import partial

import mlx.core as mx
import pytest
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.prefix_disk import ARRAYS_FILE, PrefixDisk
from lmx.generation.kv_cache.sequence import CacheState
from test_kv_cache import tiny

FIRST, SECOND = [*range(40)], [*range(25), *range(60, 80)]


class Process:
    """A prefix cache with a folder, as one process has it."""

    def __init__(
        self, model, folder, *, memory=1 << 30, disk=1 << 30, key="", **options
    ):
        self.warnings = []
        warn = self.warnings.append
        self.disk = PrefixDisk(folder, disk, lambda adapter: f"{key}{adapter}", warn)
        self.prefixes = PrefixCache(memory, self.disk)
        self.new_cache = partial(CacheState, model, **options)

    def insert(self, tokens, adapter=0):
        """A cache with these tokens, whose prefix is stored."""
        cache = self.new_cache()
        cache.adapter = adapter
        cache.forward(mx.array([tokens]))
        self.prefixes.insert(tokens, cache)
        return cache

    def fetch(self, tokens):
        return self.prefixes.fetch([*tokens, 0], self.new_cache)[0]


def files(folder):
    return sorted(folder.rglob(ARRAYS_FILE))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"kv_bits": 8}),
        ("gemma3", {}),
        ("qwen3_next", {}),
        ("mamba2", {}),
    ],
)
def test_prefixes_continue_identically_in_another_process(tmp_path, family, options):
    model = tiny(family, **({"head_dim": 32} if options else {}))
    first = Process(model, tmp_path, **options)
    caches = [first.insert(tokens) for tokens in (FIRST, SECOND)]
    assert not files(tmp_path)
    first.prefixes.save()
    second = Process(model, tmp_path, **options)
    assert second.disk.nbytes == first.disk.nbytes > 0
    assert second.prefixes.nbytes == 0
    for tokens, cache in zip((FIRST, SECOND), caches, strict=True):
        assert second.prefixes.match(tokens) == len(tokens)
        found = second.fetch(tokens)
        assert found.length == len(tokens)
        for token in (3, 5):
            one = mx.array([[token]])
            assert mx.array_equal(found.forward(one), cache.forward(one))
    assert not second.warnings


def test_what_leaves_the_memory_is_read_from_the_disk(tmp_path):
    model = tiny("llama")
    process = Process(model, tmp_path, memory=1 << 14)
    prompts = [[n, *range(10, 40)] for n in range(8)]
    caches = [process.insert(tokens) for tokens in prompts]
    assert process.prefixes.nbytes <= 1 << 14
    assert len(files(tmp_path)) >= 5
    for tokens, cache in zip(prompts, caches, strict=True):
        found = process.fetch(tokens)
        assert found.length == len(tokens)
        one = mx.array([[3]])
        assert mx.array_equal(found.forward(one), cache.forward(one))
    # Negative control: without the disk they are gone.
    memory = Process(model, tmp_path / "other", memory=1 << 14, disk=0)
    for tokens in prompts:
        memory.insert(tokens)
    assert memory.fetch(prompts[0]).length == 0
    assert not files(tmp_path / "other")


def test_a_part_of_a_run_on_the_disk_is_shared(tmp_path):
    """The run is cut where another prompt leaves it, and written again."""
    model = tiny("llama")
    first = Process(model, tmp_path)
    first.insert(FIRST)
    first.prefixes.save()
    second = Process(model, tmp_path)
    assert second.fetch(SECOND).length == 25
    second.insert(SECOND)
    second.prefixes.save()
    assert len(files(tmp_path)) == 3
    third = Process(model, tmp_path)
    assert [third.fetch(tokens).length for tokens in (FIRST, SECOND)] == [40, 45]


def test_the_least_recently_used_runs_are_deleted_first(tmp_path):
    model = tiny("llama")
    prompts = [[n, *range(10, 40)] for n in range(6)]
    first = Process(model, tmp_path)
    for tokens in prompts:
        first.insert(tokens)
    first.fetch(prompts[0])
    first.prefixes.save()
    sizes = {file.stat().st_size for file in files(tmp_path)}
    limit = 3 * max(sizes)
    second = Process(model, tmp_path, disk=limit, key="other model")
    # Runs of other models count as well.
    second.insert(prompts[0])
    second.prefixes.save()
    assert sum(file.stat().st_size for file in files(tmp_path)) <= limit
    third = Process(model, tmp_path)
    found = [third.prefixes.match(tokens) for tokens in prompts]
    assert found == [31, 0, 0, 0, 0, 31]


@pytest.mark.parametrize("other", ["model", "kv_bits", "adapter"])
def test_other_models_and_adapters_have_other_runs(tmp_path, other):
    model = tiny("llama", head_dim=32)
    first = Process(model, tmp_path)
    first.insert(FIRST, adapter=int(other == "adapter"))
    first.prefixes.save()
    key = "" if other == "adapter" else other
    second = Process(model, tmp_path, key=key)
    assert second.prefixes.match(FIRST) == 0
    again = Process(model, tmp_path)
    adapter = int(other == "adapter")
    assert again.prefixes.match(FIRST, adapter) == len(FIRST)


def damage_arrays(folder):
    file = files(folder)[0]
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def truncate(folder):
    file = files(folder)[0]
    file.write_bytes(file.read_bytes()[:-8])


def damage_index(folder):
    index = files(folder)[0].with_name("index.json")
    index.write_text(index.read_text().replace('"start": 0', '"start": 1'))


def damage_tokens(folder):
    index = files(folder)[0].with_name("index.json")
    index.write_text(index.read_text().replace("[0, 1, 2", "[0, 1, -2"))


def no_index(folder):
    files(folder)[0].with_name("index.json").write_text("{")


@pytest.mark.parametrize(
    "damage", [damage_arrays, truncate, damage_index, damage_tokens, no_index]
)
def test_damaged_runs_are_dropped(tmp_path, damage):
    model = tiny("llama")
    first = Process(model, tmp_path)
    first.insert(FIRST)
    first.prefixes.save()
    damage(tmp_path)
    second = Process(model, tmp_path)
    assert second.fetch(FIRST).length == 0
    assert not files(tmp_path)
    assert second.disk.nbytes == 0
    second.insert(FIRST)
    second.prefixes.save()
    assert Process(model, tmp_path).fetch(FIRST).length == len(FIRST)


def test_a_run_that_another_process_deleted_is_computed_again(tmp_path):
    model = tiny("llama")
    first = Process(model, tmp_path)
    first.insert(FIRST)
    first.insert([*FIRST, 7, 8])
    first.prefixes.save()
    second = Process(model, tmp_path)
    assert second.prefixes.match([*FIRST, 7, 8]) == 42
    for file in files(tmp_path):
        file.unlink()
    assert second.fetch([*FIRST, 7, 8]).length == 0
    assert second.prefixes.match(FIRST) == 0


def test_a_full_disk_is_named_and_serving_goes_on(tmp_path):
    model = tiny("llama")
    (tmp_path / "0").write_text("a file where the folder of the model should be")
    process = Process(model, tmp_path, memory=1 << 13)
    for n in range(4):
        process.insert([n, *range(10, 40)])
    process.prefixes.save()
    assert process.fetch([3, *range(10, 40)]).length == 31
