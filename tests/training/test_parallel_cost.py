"""The planner's bytes are those that processes exchange and hold."""

import json
import runpy
from pathlib import Path

import mlx.core as mx
import pytest
from lmx.config.loader import load_recipe_data
from lmx.cpu import on_cpu
from lmx.evaluation import network_bandwidth
from lmx.evaluation.network_bandwidth import Link, keep_link
from lmx.models.tensor_parallel import shard, shard_share
from lmx.pipeline import parallel_cost, work
from lmx.pipeline.dry_run import DryRun
from lmx.pipeline.plan import plan
from mlx.utils import tree_flatten
from processes import SCATTER, in_ring
from small_base import BASE
from tiny_llamas import VOCABULARY, llama, tokens_of
from tiny_steps import make_step

ROOT = Path(__file__).parents[2]
PLAN = ROOT / "benchmarks/distributed/parallel_plan.py"
WIDTH, BLOCKS = 64, 2
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128}
PROGRAM = (
    SCATTER
    + """
import sys
from lmx.run import distributed
import test_parallel_cost
test_parallel_cost.count_all(distributed.join())
"""
)


class Counter:
    """Counts the bytes of collectives: all-reduces, all-gathers, reduce-scatters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.reset()
        for name in ("all_sum", "all_gather", "sum_scatter"):
            call = getattr(mx.distributed, name)
            monkeypatch.setattr(mx.distributed, name, self.counted(name, call))

    def reset(self) -> None:
        self.bytes = dict.fromkeys(("all_sum", "all_gather", "sum_scatter"), 0)
        self.calls = self.bytes.copy()

    def counted(self, name, call):
        def counting(value, **options):
            result = call(value, **options)
            full = result if name == "all_gather" else value
            self.bytes[name] += full.nbytes
            self.calls[name] += 1
            return result

        return counting


def count_all(ranks) -> None:
    """Print what a rank exchanges in each kind of step, and the share that it holds."""
    with pytest.MonkeyPatch.context() as patches:
        # Before reduce-scatters are made of all-reduces.
        counter = Counter(patches)
        results = {}
        for name, settings in {
            "data": {},
            "fsdp": {"fsdp": True},
            "checkpointing": {"fsdp": True, "gradient_checkpointing": True},
        }.items():
            step = make_step(llama("full", **SHAPE)[0], ranks=ranks, **settings)
            counter.reset()
            mx.eval(step([tokens_of(4, 9)], 1e-3, 0)[:3])
            results[name] = counter.bytes
        model = llama("full", **SHAPE)[0]
        whole = size_of(model)
        shard(model, ranks, lambda: model)
        results["share"] = size_of(model) / whole
        counter.reset()
        mx.eval(model(tokens_of(3, 7).tokens))
        results["tensor"] = [*counter.bytes.values(), *counter.calls.values()]
    if ranks.is_first:
        print(json.dumps(results))


def size_of(model) -> int:
    return sum(value.size for _, value in tree_flatten(model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_planned_bytes_are_those_counted(tmp_path, count):
    results = in_ring(PROGRAM, folder=tmp_path, count=count)
    assert results[0].returncode == 0, results[0].stderr
    counted = json.loads(results[0].stdout)
    model = llama("full", **SHAPE)[0]
    size = size_of(model)
    # A few scalars come with the gradients.
    planned = parallel_cost.data_parallel(size)
    assert counted["data"]["all_sum"] == pytest.approx(planned.all_reduced, abs=64)
    for name, checkpointing in (("fsdp", False), ("checkpointing", True)):
        planned = parallel_cost.fsdp(size, BLOCKS, 4, checkpointing=checkpointing)
        # What is outside of the blocks is gathered once.
        outside = 4 * (VOCABULARY + 1) * WIDTH * checkpointing
        gathered = counted[name]["all_gather"] + counted[name]["sum_scatter"]
        assert gathered == pytest.approx(planned.gathered - outside, rel=1e-3)
    assert counted["share"] == shard_share(model, count)
    tokens = 3 * tokens_of(3, 7).tokens.shape[1]
    plan_pass = runpy.run_path(str(PLAN))["tensor_parallel"]
    planned = plan_pass(BLOCKS, WIDTH, VOCABULARY, 4, tokens, tokens)
    sizes = planned.all_reduced, planned.gathered, 0
    calls = planned.all_reduces, planned.gathers, 0
    assert counted["tensor"] == [*sizes, *calls]


@pytest.mark.parametrize(("processes", "sent"), [(2, 400), (4, 600)])
def test_an_all_reduce_takes_the_time_of_its_messages_and_bytes(processes, sent):
    link = Link(message_seconds=1, bytes_per_second=100)
    traffic = parallel_cost.Traffic(all_reduced=400, all_reduces=1)
    assert traffic.sent(processes) == sent
    expected = 2 * (processes - 1) + sent / 100
    assert link.all_reduce_seconds(400, processes) == expected
    assert traffic.seconds(processes, link) == expected


def test_the_slowest_part_limits_a_step():
    step_of = runpy.run_path(str(PLAN))["StepTime"]
    step = step_of(memory=3, compute=2, network=1)
    assert (step.seconds, step.limit) == (4, "memory")
    step = step_of(memory=1, compute=2, network=4)
    assert (step.seconds, step.limit) == (6, "network")


@pytest.mark.skipif(not on_cpu(), reason="the memory is that of the CPU backend")
@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_the_tables_of_the_docs_are_planned(count):
    plan = runpy.run_path(str(PLAN))
    pages = (ROOT / "docs/distributed.md").read_text()
    for machine in plan["MACHINES"]:
        for name in plan["MODELS"] if count > 2 else ["8B"]:
            assert plan["row"](machine, name, count) in pages


def lines_of(**values) -> list[str]:
    data = str(BASE.parent / "commands/train.jsonl")
    train = {"steps": 1, "batch_size": 4}
    recipe = {
        "model": str(BASE),
        "data": {"train": data, "max_samples": 20},
        "stages": [{"train": train}, {"evaluate": {}}],
    }
    loaded = load_recipe_data(recipe | values, [], name="tiny", root=BASE.parent)
    return [
        text
        for topic, text in DryRun(loaded, plan(loaded)).lines()
        if topic == "parallel"
    ]


def test_a_dry_run_shows_what_processes_exchange_and_hold(tmp_path, monkeypatch):
    monkeypatch.setenv("LMX_CACHE", str(tmp_path))
    monkeypatch.setattr(work, "_measure", lambda dtype: work.Work(1, 1, 1, 1, 1))
    assert lines_of() == []
    mesh, sent = lines_of(parallel={"data": 2})
    assert mesh == "2 (data) x 1 (tensor) = 2 processes"
    # 4 bytes of every parameter, 2 (N - 1) / N times.
    assert "14 MB sent per process and step; `lmx doctor --distributed`" in sent
    keep_link(Link(1e-3, 1e6), 2)
    assert lines_of(parallel={"data": 2})[1].endswith("per process and step, 14 s")
    assert network_bandwidth.known_link(4) is None
