"""Runs in bare environments: the same weights, no traceback, the same exit code."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lmx.files.hashes import hash_file
from tiny_runs import TRAIN, Run

pytestmark = pytest.mark.slow

TOOLKIT = Path(__file__).parents[2] / "toolkit"
PROGRAM = "import sys; from lmx.cli.main import train; sys.exit(train(sys.argv[1:]))"
SHORT = TRAIN | {"steps": 3, "eval_steps": 3, "logging_steps": 1}
PYTHONS = ("python3.12", "python3.13")


def make_run(folder: Path) -> Run:
    return Run(folder, {"train": SHORT}, {"quantize": {"method": "rtn", "bits": 4}})


@pytest.fixture
def tiny_run(tmp_path):
    return make_run(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights of the run in the environment of the tests."""
    run = make_run(tmp_path_factory.mktemp("expected"))
    done = launch(run, {})
    assert done.returncode == 0, done.stderr
    return weights(run)


def launch(run: Run, variables: dict, *, python=sys.executable, streams=""):
    """Run in a new process; None unsets a variable."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TOOLKIT), *extra()])}
    environment |= {k: v for k, v in variables.items() if v is not None}
    for name in [k for k, v in variables.items() if v is None]:
        environment.pop(name, None)
    shell = f'exec "$@" {streams}'
    command = ["/bin/sh", "-c", shell, "sh", python, "-c", PROGRAM, *run.arguments()]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400
    )


def extra() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


def weights(run: Run) -> dict[str, str]:
    files = sorted((run.output / "stages").rglob("model.safetensors"))
    assert len(files) >= 2
    return {str(file.relative_to(run.output)): hash_file(file) for file in files}


def folder_of(tmp_path: Path, *programs: str) -> str:
    """A folder with these programs alone."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in programs:
        (folder / name).symlink_to(shutil.which(name))
    return str(folder)


def kernels(tmp_path: Path) -> dict[str, str]:
    """Variables with which no kernel is compiled before."""
    (tmp_path / "tmp").mkdir()
    return {"TMPDIR": str(tmp_path / "tmp")}


STRANGE = {"HOME": "/dev/null", "PYTHONIOENCODING": "ascii"}
STRANGE |= {"COLUMNS": "40", "TERM": "dumb"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("variables", "streams", "programs"),
    [
        (dict.fromkeys(("HOME", "TERM", "LANG", "USER", "SHELL")), "", None),
        (STRANGE, "", None),
        (C_LOCALE | {"LANG": None}, "", None),
        # Without a compiler, with some programs or none.
        ({}, "", ["sh", "uname", "ls"]),
        ({}, "", []),
        ({}, ">&- 2>&- <&-", None),
        ({}, ">/dev/full 2>/dev/full", None),
        ({}, ">&-", None),
    ],
)
def test_run_in_a_bare_environment_has_the_same_weights(
    tiny_run, expected, tmp_path, variables, streams, programs
):
    if programs is not None:
        variables = {"PATH": folder_of(tmp_path, *programs)} | kernels(tmp_path)
    done = launch(tiny_run, variables, streams=streams)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert weights(tiny_run) == expected
    assert "done: " in tiny_run.log
    assert not [*(tmp_path / "tmp").rglob("*.so")]


@pytest.mark.parametrize("name", PYTHONS)
def test_another_python_has_the_same_weights(tiny_run, expected, name):
    """Set LMX_TEST_PYTHONS to a path of interpreters with lmx's dependencies."""
    places = os.environ.get("LMX_TEST_PYTHONS", os.environ["PATH"])
    python = shutil.which(name, path=places)
    if python is None:
        pytest.skip(f"there is no {name}")
    needed = "import mlx.core, mlx_lm, numpy, pydantic, yaml, jinja2, rich"
    probe = [python, "-c", needed]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(f"{name} lacks the packages that lmx needs")
    done = launch(tiny_run, {"PYTHONPATH": str(TOOLKIT)}, python=python)
    assert done.returncode == 0, done.stderr
    assert weights(tiny_run) == expected
