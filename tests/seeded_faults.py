"""Sow faults into the code, one at a time; count those that the default set catches.

    python -m pytest --cov=lmx --cov-context=test      once, with pytest-cov
    python tests/seeded_faults.py

A fault replaces one piece of text of the package (`seeded_faults.txt`). It is caught if
a test fails that executes the changed line, by the recorded coverage; tests beside the
code run first. A fault whose text does not occur exactly once is named and skipped.
This program changes a copy of the checkout.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_suffix(".txt")
LIMIT = 240  # seconds of all tests of a fault


def read_faults() -> list[tuple[str, str]]:
    """Of every fault the text, and the text in its place."""
    faults = []
    for block in FAULTS.read_text().strip("\n").split("\n\n"):
        lines = block.splitlines()
        faults.append(
            tuple("\n".join(x[1:] for x in lines if x[0] == sign) for sign in "-+")
        )
    return faults


def sow(root: Path, text: str, replacement: str) -> tuple[Path, range] | None:
    """Write the fault into the only file with the text; returns it and the lines."""
    files = [(p, p.read_text()) for p in (root / "toolkit").rglob("*.py")]
    places = [(path, content) for path, content in files if text in content]
    if len(places) != 1 or places[0][1].count(text) != 1:
        return None
    path, content = places[0]
    first = content[: content.index(text)].count("\n") + 1
    path.write_text(content.replace(text, replacement))
    return path, range(first, first + text.count("\n") + 1)


class Recorded:
    """Which tests execute a line, from the data of pytest-cov."""

    def __init__(self, data: Path):
        from coverage import CoverageData

        self.data = CoverageData(str(data))
        self.data.read()

    def tests(self, path: Path, lines: range) -> list[str]:
        """Node ids: those beside the code first, then the others of its package."""
        part = "/".join(path.parts[path.parts.index("toolkit") :])
        file = next(f for f in self.data.measured_files() if f.endswith(part))
        contexts = self.data.contexts_by_lineno(file)
        found = {c.split("|")[0] for line in lines for c in contexts.get(line, ())}
        package = path.parts[path.parts.index("lmx") + 1]
        tests = sorted(found - {""})
        return sorted(tests, key=lambda t: (path.stem not in t, package not in t))


def run_tests(root: Path, tests: list[str]) -> str:
    """What the tests say of a fault."""
    listed = root / "tests.txt"
    listed.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "no:xdist", "-o", "addopts=", f"@{listed}"]
    environment = os.environ | {"PYTHONPATH": str(root / "toolkit")}
    start = time.monotonic()
    try:
        result = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"survived {LIMIT} s of tests"
    seconds = time.monotonic() - start
    names = {0: "survived", 1: "caught", 2: "caught"}
    code = names.get(result.returncode, f"pytest: {result.returncode}")
    failed = [x for x in result.stdout.decode().splitlines() if x.startswith("FAILED")]
    return f"{code} in {seconds:.0f} s {' '.join(failed)[:150]}"


def main() -> None:
    """Sow every fault, and print what became of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th fault from i")
    arguments = parser.parse_args()
    recorded = Recorded(arguments.root / ".coverage")
    number, step = map(int, arguments.part.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        for text, replacement in read_faults()[number::step]:
            copy = Path(folder) / "copy"
            ignore = shutil.ignore_patterns(".git", ".venv", "exports", "__pycache__")
            shutil.copytree(arguments.root, copy, ignore=ignore)
            place = sow(copy, text, replacement)
            if place is None:
                outcome = "skipped: the text is not there once"
            else:
                tests = recorded.tests(*place)
                outcome = f"{len(tests)} tests: " + run_tests(copy, tests)
            print(f"{text.strip()[:60]!r}: {outcome}", flush=True)
            shutil.rmtree(copy)


if __name__ == "__main__":
    main()
