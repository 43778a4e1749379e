"""The public names: lazy, complete, typed."""

import ast
import subprocess
import sys
from pathlib import Path

import lmx
import pytest

ROOT = Path(lmx.__file__).parent
PROGRAM = """
import sys, time
start = time.perf_counter()
import lmx
seconds = time.perf_counter() - start
heavy = {"mlx", "numpy", "pydantic", "yaml", "mlx_lm"} & set(sys.modules)
assert not heavy, heavy
assert dir(lmx) == sorted(dir(lmx)) and "train" in dir(lmx)
from lmx import UserError
print(seconds)
"""


def test_import_costs_nothing():
    seconds = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    ).stdout
    assert float(seconds) < 0.3


def test_names_for_type_checkers_are_those_of_the_program():
    [block] = [
        n
        for n in ast.parse((ROOT / "__init__.py").read_text()).body
        if isinstance(n, ast.If)
    ]
    typed = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {*typed, "__version__"} == set(lmx.__all__)
    for name, module in typed.items():
        assert getattr(lmx, name).__module__ == f"lmx.{module}"
        assert getattr(lmx, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = lmx.trian


def test_wheel_says_that_it_is_typed():
    assert (ROOT / "py.typed").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [None, "lmx.train('r.yaml', quit=True)"])
def test_types_are_correct(mistake, tmp_path):
    program = tmp_path / "program.py"
    whole = (Path(__file__).parent / "whole_api.py").read_text()
    program.write_text(f"{whole}\n{mistake or ''}\n")
    config = ROOT.parents[1] / "pyproject.toml"
    checked = [program] if mistake else [program, ROOT / "api", ROOT / "__init__.py"]
    process = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={config}", *checked],
        capture_output=True,
        text=True,
        env={"MYPYPATH": str(ROOT.parent), "PATH": ""},
        cwd=tmp_path,
        check=False,
    )
    assert process.returncode == (1 if mistake else 0), process.stdout
