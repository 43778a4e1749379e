"""Predictions, completions and hidden states that processes compute together."""

import pytest
import warm
from lmx.files.hashes import hash_file
from processes import WRONG_SHARD, in_ring
from test_drafter_stage import DRAFT
from test_preference_runs import make_run as preference_run
from test_teacher_setup import GENERATED, GRID
from tiny_runs import TRAIN, Run

# Small blocks, so that there is one for every process; caches of their own.
SETUP = """
import os, sys

os.environ["LMX_CACHE"] = sys.argv.pop(1)
if "disks" in os.environ["LMX_CACHE"]:
    os.environ["LMX_CACHE"] += os.environ["MLX_RANK"]
from lmx.generation import completions
from lmx.training import reference_log_probs, teacher_cache

completions.BATCH_SIZE = 6
reference_log_probs.BLOCK_SEQUENCES = 8
teacher_cache.BLOCK_TOKENS = 64
"""
MAIN = "from lmx.cli.main import train; sys.exit(train())"
# What processes of one machine may divide, by the case that has it.
KINDS = {
    "teacher": ("targets", "completions"),
    "preference": ("reference-log-probs",),
    "eagle3": ("completions", "draft_targets", "hidden_states"),
}


def make_run(folder, case, base) -> Run:
    folder.mkdir()
    if case == "preference":
        return preference_run(folder, "dpo-lora", base, steps=2)
    if case == "teacher":
        qat = {"qat": GRID | {"quantizer": "lsq"}, "teacher": GENERATED}
        return Run(folder, {"train": TRAIN | qat | {"steps": 2}}, model=base)
    draft = DRAFT | {"architecture": case, "steps": 2, "eval_steps": 2}
    draft |= {"benchmark": {"num_prompts": 2, "max_tokens": 8}}
    run = Run(folder, {"draft": draft}, model=base)
    run.data["max_seq_length"] = 128
    run.write()
    return run


def contents(cache, case):
    """Hashes of the files, and how many entries of each kind there are."""
    folders = [cache / kind for kind in KINDS[case]]
    files = [p for folder in folders for p in folder.rglob("*") if p.is_file()]
    return {str(p.relative_to(cache)): hash_file(p) for p in files if p.name != "lock"}


def first_loss(run):
    return next(r["loss"] for r in run.records() if r["kind"] == "train")


@pytest.mark.slow
@pytest.mark.parametrize("case", KINDS)
def test_processes_make_the_data_of_one(tmp_path, base, case):
    one = make_run(tmp_path / "one", case, base)
    arguments = [str(tmp_path / "cache-one"), *one.arguments()]
    process = warm.run(SETUP + MAIN, *arguments)
    assert process.returncode == 0, process.stderr
    expected = contents(tmp_path / "cache-one", case)
    assert {path.split("/")[0] for path in expected} == {*KINDS[case]}
    first = first_loss(one)
    for name, count, program in (
        ("disks", 2, ""),
        ("three", 3, ""),
        ("wrong", 2, WRONG_SHARD),
    ):
        run = make_run(tmp_path / name, case, base)
        cache = tmp_path / f"cache-{name}"
        processes = in_ring(
            SETUP + program + MAIN,
            str(cache),
            *run.arguments(),
            folder=run.folder,
            count=count,
        )
        codes = [process.returncode for process in processes]
        if program:
            assert codes != [0, 0]
            continue
        assert codes == [0] * count, processes[0].stderr
        caches = sorted(tmp_path.glob(f"cache-{name}*"))
        assert len(caches) == (2 if name == "disks" else 1)
        assert contents(caches[0], case) == expected
        for cache in caches[1:]:
            # Only rank 0 completes the prompts of the benchmark and of the selection.
            missing = expected.items() - contents(cache, case).items()
            assert len(missing) == (4 if "draft_targets" in KINDS[case] else 0)
            assert all(path.startswith("completions") for path, _ in missing)
        assert first_loss(run) == pytest.approx(first, rel=1e-5)
