"""Separate processes for the runs of a benchmark."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
# Python programs: `lmx-train` and `lmx`.
TRAIN, LMX = (
    f"import sys; from lmx.cli import main; sys.exit(main.{name}(sys.argv[1:]))"
    for name in ("train", "main")
)


def call(
    command: Iterable[str | Path],
    threads: int | None = None,
    *,
    python: str = sys.executable,
    stock: bool = False,
) -> str:
    """Run a Python program and return its output; exit if it fails.

    Args:
        threads: of the BLAS; None: all cores.
        stock: with the BLAS of MLX's wheel.
    """
    environment = {name: v for name, v in os.environ.items() if name != "LMX_CPU"}
    if stock:
        environment["LMX_CPU"] = "off"
    for name in ("LMX_BLAS_THREADS", "OMP_NUM_THREADS") if threads else ():
        environment[name] = str(threads)
    command = [python, *map(str, command)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def measure(command: Iterable[str | Path], *options, **settings) -> dict:
    """The JSON that a program prints last; libraries print their reports before it."""
    return json.loads(call(command, *options, **settings).splitlines()[-1])


def run_recipe(
    recipe: dict,
    output: Path,
    threads: int | None = None,
    overrides: Iterable[str] = (),
) -> Path:
    """Run or resume a recipe, which is written beside its output folder."""
    path = output.with_name(f"{output.name}.yaml")
    # JSON is valid YAML.
    path.write_text(json.dumps(recipe | {"output": str(output.resolve())}))
    call(["-c", TRAIN, path, *overrides, "--quiet", "--ignore-limits"], threads)
    return output


def alternate(
    names: Iterable[str], repeats: int, run: Callable[[str], dict]
) -> dict[str, list[dict]]:
    """All runs by name. The order alternates, so that changes of clock speed favour
    none."""
    runs: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(repeats):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            runs[name].append(run(name))
    return runs
