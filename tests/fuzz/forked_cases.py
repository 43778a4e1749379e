"""Runs fuzz cases in forked processes, with a limit on time and memory for each case.

A test gives the name of its module and the seeds of its cases. The module has
`run_case(seed, **settings)`, which returns what happened, or raises. A process makes
many cases; after a crash of native code or a wait, another one goes on with the next.
"""

import contextlib
import importlib
import io
import json
import os
import resource
import signal
import sys
import traceback
from collections import Counter
from pathlib import Path

import warm

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
PROGRAM = """
import sys
sys.path[:0] = {paths!r}
import forked_cases
forked_cases.work()
"""
CASE_SECONDS = 30
# Beyond what the imported libraries have reserved.
ADDRESS_SPACE = 2 << 30
# A tiny model needs a few megabytes.
CASE_BYTES = 400 << 20
MAX_SHOWN = 12


def run_cases(
    module: str, seeds: list[str], function: str = "run_case", **settings
) -> Counter:
    """Run all cases; returns the count of every outcome.

    Args:
        function: of the module; called with a seed and the settings.

    Raises:
        AssertionError: with the seeds and the tracebacks of the cases that failed.
    """
    paths = [
        str(FOLDER),
        str(TESTS),
        *(str(TESTS / name) for name in ("convert", "data", "models")),
    ]
    program = PROGRAM.format(paths=paths)
    waiting, outcomes, failures = list(seeds), Counter(), []
    while waiting:
        job = {"module": module, "function": function, "seeds": waiting}
        job["settings"] = settings
        result = warm.run(
            program,
            stdin=json.dumps(job),
            timeout=60 + CASE_SECONDS * len(waiting),
        )
        records = [json.loads(line) for line in result.stdout.splitlines()]
        done = {record["seed"] for record in records if "outcome" in record}
        for record in records:
            if "outcome" in record:
                outcomes[record["outcome"]] += 1
            if record.get("outcome") == "failed":
                failures.append(f"{record['seed']}: {record['detail']}")
        waiting = [seed for seed in waiting if seed not in done]
        if result.returncode:
            assert records, result.stderr
            end = f"the process ended with code {result.returncode}"
            failures.append(f"{records[-1]['seed']}: {end}\n{result.stderr[-500:]}")
            outcomes["crashed"] += 1
            waiting = waiting[1:]
    shown = "\n\n".join(failures[:MAX_SHOWN])
    assert not failures, f"{len(failures)} of {len(seeds)} cases failed\n\n{shown}"
    return outcomes


def work() -> None:
    """Run the cases that the standard input names; one line of JSON for each."""
    job = json.load(sys.stdin)
    report = os.dup(1)
    os.dup2(2, 1)
    run_case = getattr(importlib.import_module(job["module"]), job["function"])
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for seed in job["seeds"]:
        _write(report, {"seed": seed})
        # Without a handler the process ends, also within native code.
        signal.alarm(CASE_SECONDS)
        before = _peak_bytes()
        record = {"seed": seed} | _outcome(run_case, seed, job["settings"])
        if record["outcome"] != "failed" and _peak_bytes() - before > CASE_BYTES:
            size = (_peak_bytes() - before) >> 20
            record |= {"outcome": "failed", "detail": f"took {size} MiB"}
        signal.alarm(0)
        _write(report, record)


def _outcome(run_case, seed: str, settings: dict) -> dict:
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return {"outcome": run_case(seed, **settings)}
    # Not Exception: a panic of Rust code is none.
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", []))
        lines = traceback.format_exc().strip().splitlines()
        return {"outcome": "failed", "detail": "\n".join([notes, *lines[-14:]])}


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _write(handle: int, record: dict) -> None:
    os.write(handle, json.dumps(record).encode() + b"\n")
