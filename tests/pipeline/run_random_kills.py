"""Kill random processes of distributed runs at random moments, and resume them.

    python tests/pipeline/run_random_kills.py --kills 100

The recipe trains, quantizes, evaluates and exports. Every second run always has two
processes, and must end with the files of an undisturbed run. The others resume with
one to three processes, whose sums are in another order: their weights are close. After
a kill the other processes must end by themselves, and no finished stage may be lost.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import mlx.core as mx
from processes import hostfile
from tiny_runs import METRICS_ONLY, TRAIN, Run
from warm import Process, warm_up

MAIN = "import sys; from lmx.cli.main import train; sys.exit(train())"
STAGES = (
    {"train": TRAIN},
    {"quantize": {"method": "gptq", "bits": 4, "group_size": 32}},
    {"evaluate": METRICS_ONLY},
    {"export": {"formats": ["mlx"]}},
)
# Within which the others must end, and a run that nobody kills.
END_SECONDS, RUN_SECONDS = 60, 300
# Of trained weights after sums in another order, and of the losses: other weights get
# other codes.
TOLERANCE, LOSS_TOLERANCE = 2e-3, 0.02


class Attempt:
    """The processes of one start of a run."""

    def __init__(self, run: Run, count: int):
        warm_up(count)
        hosts = hostfile(run.folder, count)
        self.processes = []
        for rank in range(count):
            environment = dict(os.environ)
            if count > 1:
                environment |= {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
            arguments = [*run.arguments(), "--ignore-limits"]
            process = Process(MAIN, *arguments, env=environment, server=rank)
            self.processes.append(process)
            time.sleep(0.3)

    def end(self, seconds: float) -> tuple[list[int], float, str]:
        """Exit codes, the seconds until the last one, and the messages."""
        start = time.monotonic()
        results = [process.result(seconds) for process in self.processes]
        messages = "".join(result.stderr for result in results)
        codes = [result.returncode for result in results]
        return codes, time.monotonic() - start, messages


def finished_stages(run: Run) -> set[str]:
    """The stages that the manifest calls complete."""
    manifest = run.output / "manifest.json"
    if not manifest.is_file():
        return set()
    return {*json.loads(manifest.read_text())["stages"]}


def differences(run: Run, expected: Run, *, exact: bool) -> list[str]:
    """What differs between the results of two runs, in words."""
    if exact:
        return [] if run.outcome()[0] == expected.outcome()[0] else ["other files"]
    trained, theirs = (
        mx.load(str(next(each.output.glob("stages/1-train/*/model.safetensors"))))
        for each in (run, expected)
    )
    found = [] if trained.keys() == theirs.keys() else ["other tensors"]
    for name, value in theirs.items():
        limit = TOLERANCE * mx.abs(value).max().item()
        if not mx.allclose(trained[name], value, atol=limit):
            found.append(f"{name} differs by more than {TOLERANCE}")
    losses = [each.json("report.json")["models"] for each in (run, expected)]
    for model, figures in losses[1].items():
        loss, other = figures["loss"], losses[0][model]["loss"]
        if abs(loss - other) > LOSS_TOLERANCE:
            found.append(f"{model}: loss {other}, not {loss}")
    return found


def main() -> int:
    """Kill and resume; the exit code is 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        return kill_and_resume(Path(folder), arguments.kills, generator)


def kill_and_resume(folder: Path, kills: int, generator: random.Random) -> int:
    # The first one compiles kernels.
    for name in ("first", "undisturbed"):
        expected = new_run(folder / name)
        start = time.monotonic()
        codes, _, messages = Attempt(expected, 2).end(RUN_SECONDS)
        whole = time.monotonic() - start
        assert codes == [0, 0], messages
    print(f"undisturbed: {whole:.1f} s with 2 processes", flush=True)
    faults, done, runs, slowest, during = [], 0, 0, 0.0, Counter()
    while done < kills:
        run, exact = new_run(folder / f"run{runs}"), runs % 2 == 0
        finished = set()
        while True:
            count = 2 if exact else generator.randint(1, 3)
            attempt = Attempt(run, count)
            wait = generator.uniform(0, whole)
            victim = attempt.processes[generator.randrange(count)]
            end = time.monotonic() + wait
            while time.monotonic() < end and victim.poll() is None:
                time.sleep(0.05)
            was_running = victim.poll() is None
            if was_running and done < kills:
                names = [*map(next, map(iter, STAGES)), "the end"]
                during[names[len(finished_stages(run))]] += 1
                victim.kill()
                done += 1
            codes, seconds, messages = attempt.end(
                END_SECONDS if was_running and done < kills else RUN_SECONDS
            )
            if was_running:
                slowest = max(slowest, seconds)
            if lost := finished - finished_stages(run):
                faults.append(f"kill {done}: {sorted(lost)} lost")
            finished = finished_stages(run)
            if "Traceback" in messages:
                faults.append(f"kill {done}: {messages}")
            if all(code == 0 for code in codes):
                break
        found = differences(run, expected, exact=exact)
        faults += [f"run {runs}: {text}" for text in found]
        faults += [f"run {runs}: {path} is left" for path in run.partial_files()]
        runs += 1
        print(f"{done} kills, {runs} runs, {len(faults)} faults", flush=True)
    stages = ", ".join(f"{count} in {name}" for name, count in during.items())
    print(f"{done} kills ({stages}); the others ended within {slowest:.1f} s")
    for fault in faults:
        print(fault)
    return int(bool(faults))


def new_run(folder: Path) -> Run:
    folder.mkdir()
    return Run(folder, *STAGES)


if __name__ == "__main__":
    sys.exit(main())
