"""The notebooks in docs/ run from a clean kernel, and show what their text says."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "docs/notebooks"
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
MAX_BYTES = 40_000


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", nbformat.NO_CONVERT)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: nbformat.NotebookNode) -> str:
    """All that the cells write to the standard output."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "".join(o.text for o in outputs if o.get("name") == "stdout")


def check_qat(text: str) -> None:
    """QAT lowers the perplexity of the rounded model, and the validation loss."""
    rounded, trained = map(float, re.findall(r"perplexity (\d+\.\d+)", text))
    assert trained < rounded
    sizes = re.findall(r"(\S+) bits per weight", text)
    assert sizes[0] == sizes[1]
    losses = [float(loss) for loss in re.findall(r"validation loss (\S+)", text)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def check_quantize(text: str) -> None:
    """GPTQ has less KL than RTN; 2 bits have several times that of 3 bits."""
    rows = re.findall(r"(\d) bits, (\w+) +kl (\S+)", text)
    kl = {(bits, method): float(value) for bits, method, value in rows}
    assert len(kl) == 4
    for bits in "32":
        assert kl[bits, "gptq"] < kl[bits, "rtn"]
    for method in ("rtn", "gptq"):
        assert kl["2", method] > 2 * kl["3", method]


CHECKS = {"qat": check_qat, "quantize": check_quantize}
# What takes most of the time, and less of it that shows the same.
FEW = {
    "qat": {'"steps": 40': '"steps": 12', '"eval_steps": 20': '"eval_steps": 6'},
    "quantize": {'"num_tokens": 3072': '"num_tokens": 1024'},
}


def test_every_notebook_is_checked():
    assert {path.stem for path in PATHS} == CHECKS.keys()


@pytest.mark.parametrize("name", CHECKS)
def test_notebook_has_the_outputs_that_its_text_describes(name):
    notebook = read(name)
    nbformat.validate(notebook)
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < MAX_BYTES
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    # Neither warnings nor folders of the machine that made them.
    assert all(output.get("name") != "stderr" for output in outputs)
    assert not re.search(r"/(tmp|home|Users|root)/", str(outputs))
    CHECKS[name](printed(notebook))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_notebook_runs_from_a_clean_kernel(name, tmp_path):
    notebook = read(name)
    for cell in code_cells(notebook):
        cell.outputs = []
    for shown, few in FEW[name].items():
        [cell] = [cell for cell in code_cells(notebook) if shown in cell.source]
        cell.source = cell.source.replace(shown, few)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=400, resources=resources).execute()
    CHECKS[name](printed(notebook))
    assert (tmp_path / "exports").is_dir()
