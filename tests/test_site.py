"""The documentation site: navigation, llms.txt, the guide to methods, and the build."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import lmx
import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = {f"benchmarks/results/{p.name}" for p in ROOT.glob("benchmarks/results/*.md")}
CONFIG = (ROOT / "mkdocs.yml").read_text()
NAV = set(re.findall(r"^ +- .*: ([\w/]+\.(?:md|ipynb))$", CONFIG, re.MULTILINE))
LLMS = (DOCS / "llms.txt").read_text()
METHODS = (DOCS / "methods.md").read_text()
LINKS = re.compile(r"\]\(([^)#]+)[^)]*\)")
# Files that the site is made of, beside docs/.
SOURCES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml"]


def test_every_page_is_in_the_navigation():
    pages = [*DOCS.glob("*.md"), *DOCS.glob("notebooks/*.ipynb")]
    names = {str(path.relative_to(DOCS)) for path in pages}
    assert len(names) > 15
    assert names <= NAV
    # The others come from outside docs/.
    assert {"overview.md", *RESULTS, "CHANGELOG.md"} <= NAV - names


def test_llms_txt_has_title_summary_and_every_page():
    title, _, summary, *_ = LLMS.splitlines()
    assert title == "# lmx"
    assert summary.startswith("> ")
    links = [line for line in LLMS.splitlines() if line.startswith("- ")]
    assert all(re.fullmatch(r"- \[.+\]\(\S+\): .+", line) for line in links)
    pages = {path.name for path in DOCS.glob("*.md")}
    pages |= {f"notebooks/{path.name}" for path in DOCS.glob("notebooks/*.ipynb")}
    assert pages <= set(LINKS.findall(LLMS))


def test_api_page_has_every_public_name():
    names = re.findall(r"^::: lmx\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted([*names, "__version__"]) == lmx.__all__


def memory_rows() -> dict[str, list[str]]:
    """Gigabytes of the table by memory, by recipe."""
    table = METHODS.partition("## By memory")[2]
    rows = re.findall(r"^\| \[(\w+)\]\(\S+\)(.*)$", table, re.MULTILINE)
    return {name: gigabytes(row) for name, row in rows}


def gigabytes(text: str) -> list[str]:
    """Numbers of gigabytes, also the first ones of "7 and 10 GB"."""
    return re.findall(r"(\d+)(?= GB| and \d+ GB)", text)


@pytest.mark.parametrize("recipe", ["full", "lora", "ptq_4bit", "qat_4bit"])
def test_memory_of_a_method_is_that_of_its_recipe(recipe):
    comments = (ROOT / f"recipes/{recipe}.yaml").read_text()
    comments = comments.replace(" GB for the first model, ", " and ")
    stated = set(memory_rows()[recipe])
    assert stated
    assert stated <= set(gigabytes(comments))


def test_figures_of_methods_are_results():
    results = "".join((ROOT / name).read_text() for name in RESULTS)
    figures = set(re.findall(r"(?<![\w.])\d*\.\d+ ± \d*\.\d+", METHODS))
    assert len(figures) > 8
    missing = {figure for figure in figures if figure not in results}
    # In percent here, a fraction there.
    assert missing == {"73.9 ± .6"}
    assert ".739 ± .006" in results


def copy_sources(folder: Path) -> Path:
    """The files of the site in a folder, with the package as a link."""
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    for name in ("docs", "recipes", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests/README.md", folder / "tests")
    (folder / "toolkit").symlink_to(ROOT / "toolkit")
    return folder


def build(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
def test_site_is_built(tmp_path):
    pytest.importorskip("mkdocs_jupyter")
    process = build(copy_sources(tmp_path))
    assert process.returncode == 0, process.stderr
    site = tmp_path / "site"
    links = LINKS.findall((site / "llms.txt").read_text())
    assert len(links) > 20
    assert all((site / link).is_file() for link in links)
    index = json.loads((site / "search/search_index.json").read_text())
    places = {entry["location"] for entry in index["docs"] if "GPTQ" in entry["text"]}
    assert {"quantization/#methods", "methods/#by-task"} <= places
    assert "included_recipes/#ptq_4bit" in places
    assert "lmx.quantize" in (site / "api/index.html").read_text()
    assert "perplexity" in (site / "notebooks/qat/index.html").read_text()


@pytest.mark.slow
def test_build_refuses_what_does_not_exist(tmp_path):
    pytest.importorskip("mkdocs_jupyter")
    copy_sources(tmp_path)
    broken = {
        "docs/qat.md": "[a](missing_page.md) [b](training.md#missing-one)",
        "benchmarks/results/qat.md": "[a page](../../docs/missing_too.md)",
        "README.md": "[a file](MISSING)",
    }
    for page, text in broken.items():
        path = tmp_path / page
        path.write_text(f"{path.read_text()}\n{text}\n")
    process = build(tmp_path)
    assert process.returncode == 1
    for name in ("missing_page.md", "#missing-one", "missing_too.md", "MISSING"):
        assert f"{name}'" in process.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "before", "after"),
    [
        ("api.md", "::: lmx.check", "::: lmx.missing"),
        ("notebooks/qat.ipynb", "(../qat.md)", "(../missing.md)"),
    ],
)
def test_build_refuses_a_missing_target_of(page, before, after, tmp_path):
    pytest.importorskip("mkdocs_jupyter")
    path = copy_sources(tmp_path) / "docs" / page
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    process = build(tmp_path)
    assert process.returncode == 1
    assert "missing" in process.stderr
