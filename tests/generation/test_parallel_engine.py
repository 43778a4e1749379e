"""Processes that hold a model together generate what one does."""

import json
from pathlib import Path

import pytest
import tiny_parallel
from processes import in_ring

PROGRAM = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import tiny_parallel
from lmx.run import distributed
tiny_parallel.generate(distributed.join(), Path(sys.argv[1]), *sys.argv[2:])
"""


def in_ranks(folder, family, fault, *kinds, count=2) -> list[dict]:
    """What every rank saved."""
    names = str(folder), family, fault, *kinds
    results = in_ring(PROGRAM, *names, folder=folder, count=count)
    assert not any(r.returncode for r in results), [r.stderr for r in results]
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(count)]


def assert_equal(ranks: list[dict], family: str, kinds) -> None:
    for kind in kinds:
        assert ranks[0][kind] == tiny_parallel.expected(kind, family), kind
        for name in ("checksum", "rounds", "prefixes"):
            key = f"{kind} {name}"
            assert all(rank[key] == ranks[0][key] for rank in ranks), key
        is_fixed = kind in tiny_parallel.DRAFTS
        assert ranks[0][f"{kind} rounds"] > 0 or not is_fixed


def test_two_ranks_generate_what_one_does(tmp_path):
    assert_equal(in_ranks(tmp_path, "llama", "", "lookup"), "llama", ["lookup"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", ("sampled", "adaptive", "draft")),
        ("llama", ("grammar", "kv_bits")),
        ("small", ("eagle3", "dflash")),
        ("llama", ("window", "snapkv")),
        ("qwen3_5", ("greedy", "lookup")),
        ("gpt_oss", ("greedy", "lookup")),
        ("deepseek_v3", ("greedy", "lookup")),
        ("qwen3_next", ("greedy", "lookup", "evicted")),
        ("qwen3_next", ("adaptive", "draft", "layer_bits")),
        ("qwen3_next", ("window", "snapkv")),
        ("bailing_hybrid", ("sampled", "lookup", "grammar")),
    ],
)
def test_kinds_of_requests(tmp_path, family, kinds):
    ranks = in_ranks(tmp_path, family, "", *kinds)
    assert_equal(ranks, family, kinds)
    if "evicted" in kinds:
        # Both drop the same prefixes, and not for the bytes of their own.
        first, second = (rank["evicted bytes"] for rank in ranks)
        assert first["counted"] == second["counted"]
        assert first["held"] != second["held"]
        assert len(ranks[0]["evicted prefixes"]) < len(ranks[0]["greedy prefixes"]) / 2


@pytest.mark.slow
def test_four_ranks(tmp_path):
    ranks = in_ranks(tmp_path, "llama", "", "lookup", count=4)
    assert_equal(ranks, "llama", ["lookup"])


@pytest.mark.slow
def test_a_wrong_part_gives_other_tokens(tmp_path):
    """Negative control: both ranks hold the part of rank 0."""
    ranks = in_ranks(tmp_path, "llama", "wrong", "greedy")
    assert ranks[0]["greedy"] != tiny_parallel.expected("greedy", "llama")


def test_ranks_that_do_not_agree_end(tmp_path):
    first, second = in_ranks(tmp_path, "llama", "diverges", "greedy")
    assert first["error"].startswith("process 0 generated other tokens than process 1")
    assert second["error"].startswith("process 1 generated other tokens than process 0")
