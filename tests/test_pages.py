"""Every command that README and docs show is run, every recipe in them is one, and what
they say of both is so.

A word behind the language of a block, as in "bash network", means that its commands
want what a test does not have: another machine, the Hub, a longer run. They are read up
to the point where their work would begin.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm
import yaml
from lmx.cli import main
from lmx.cli.schema import markdown
from lmx.config.loader import load_recipe
from lmx.pipeline.plan import plan
from small_base import write_small_base

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
BIN = Path(sys.executable).parent
BLOCK = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Run by test_recipes.py and test_benchmarks.py, at settings of their own.
TESTED_APART = re.compile(
    r"lmx-train recipes/(?!qat_4bit)\w+\.yaml"
    r"|python benchmarks/(train_step|finetune|generate)\.py.*"
)
# Programs of others, which are shown beside ours.
OTHERS = {"hf", "mlx_lm.generate", "mlx_lm.server", "python"}
# Ours, and what they call.
PROGRAMS = {"lmx": "main", "lmx-train": "train"}
CALL = "import sys; from lmx.cli import main as cli; sys.exit(cli.{}())"
# Started as they were installed; who needs no imports of its own costs a fourth.
INSTALLED = {
    "lmx-train recipes/qat_4bit.yaml",
    "lmx-train --list",
    "lmx schema adapter",
    "lmx doctor",
    'lmx generate exports/qat_4bit --prompt "Sort: 31, 7, 12"',
}
WORK = ("pipeline.runner", "cli.generate", "cli.convert", "cli.push")
# What a recipe has that is shown by its stages alone.
AROUND = {
    "model": "data/tiny-base",
    "data": {"train": "data/skills/train.jsonl", "valid": "data/skills/valid.jsonl"},
}
SMALL = [
    "data.max_samples=200",
    "stages.train.steps=2",
    "stages.train.batch_size=4",
    "stages.train.eval_batches=1",
    "stages.evaluate.num_tokens=200",
    "stages.evaluate.exact_match_samples=2",
    "stages.evaluate.num_samples=1",
    "stages.evaluate.latency_tokens=8",
]
SMALL_BENCHMARKS = {
    # Wide enough to be killed between two blocks.
    "ptq_large": "--hidden 128 --intermediate 128 --layers 3 --heads 2 "
    "--key-value-heads 2 --vocabulary 320 --calibration 1024 --rounds 1 --whole",
    "ptq_time": "--hidden 64 --layers 1 --vocabulary 320 --tokens 256 --length 64",
    "qat_step": "--hidden 64 --layers 1 --vocabulary 512 --batch 2 --length 32 "
    "--steps 3 --grids minmax learned",
    "qat_quality": "--model small-base --seeds 1 --bits 2 --steps 2 --batch 4 "
    "--tune 1 --limit 40 --calibration 1024 --routes 'rtn of the twin' 'qat minmax'",
    "draft_quality": "--model small-base --seeds 1 --prompts 8 --held-out 4 "
    "--trial-prompts 2 --max-tokens 8 --steps 2 --batch-tokens 512 --blocks 1",
}
SMALL_BENCH = ["--tokens=8", "--repeats=1", "--prompt-lengths=16"]


def blocks(language: str) -> list[tuple[str, str, str]]:
    """Page, mark and text of every block of a language."""
    return [
        (page, mark, text)
        for page, whole in PAGES.items()
        for found, mark, text in BLOCK.findall(whole)
        if found == language
    ]


def commands(*, marked: bool) -> list[str]:
    lines = [
        (bool(mark), line.partition("  #")[0].strip())
        for _, mark, text in blocks("bash")
        for line in text.splitlines()
        if line.strip()
    ]
    return [line for is_marked, line in lines if is_marked == marked]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder where the main job was run as the README says, but for its length."""
    folder = tmp_path_factory.mktemp("workplace")
    done = run("lmx-train recipes/qat_4bit.yaml", folder)
    assert done.returncode == 0, done.stderr
    # For benchmarks, which compare what is made of one model.
    write_small_base(folder / "small-base")
    # What --restart would set aside.
    runs = folder / "exports"
    shutil.copytree(runs / "qat_4bit", runs / "qat_4bit.old-1")
    return folder


def run(shown: str, folder: Path) -> subprocess.CompletedProcess:
    said, _, command = shown.rpartition(" | ")
    program, *arguments = shlex.split(command)
    if program == "lmx-train" and not any(a.startswith("--") for a in arguments):
        arguments += [a for a in SMALL if a.partition("=")[0] not in command]
    if arguments[0] == "bench":
        arguments += SMALL_BENCH
    if program == "python":
        arguments += shlex.split(SMALL_BENCHMARKS[Path(arguments[0]).stem])
    ours = re.compile(r"(?:^|(?<=\+))(?=recipes/|benchmarks/|data/)")
    arguments = [ours.sub(f"{ROOT}/", argument) for argument in arguments]
    said = said and shlex.split(said)[1]
    if program in PROGRAMS and shown not in INSTALLED:
        called = CALL.format(PROGRAMS[program])
        return warm.run(called, *arguments, cwd=folder, said=said, timeout=240)
    return subprocess.run(
        [BIN / program, *arguments],
        cwd=folder,
        input=said,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def main_part(command: str) -> str:
    """What is left of a line when the installing is done."""
    command = command.split(" && ")[-1]
    return re.sub(r"^(uv run (--extra test )?|\.venv/bin/)", "", command)


TESTED = sorted({main_part(command) for command in commands(marked=False)})
RUN = [c for c in TESTED if "pytest" not in c and not TESTED_APART.fullmatch(c)]
READ = sorted({*commands(marked=True), *filter(TESTED_APART.fullmatch, TESTED)})


@pytest.mark.parametrize("command", RUN)
def test_a_shown_command_works(command, workplace):
    done = run(command, workplace)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("command", READ)
def test_a_command_for_elsewhere_is_understood(command, monkeypatch):
    reached = []
    for module in WORK:
        monkeypatch.setattr(
            f"lmx.{module}.run", lambda *_, **__: reached.append(1) or 0
        )
    program, *arguments = shlex.split(command.rpartition(" -- ")[2])
    if program == "python":
        assert (ROOT / arguments[0]).is_file()
    if program not in OTHERS:
        verb = {"lmx": main.main, "lmx-train": main.train}[program]
        assert verb(arguments) == 0
        assert reached


@pytest.mark.parametrize(
    ("page", "text"), [(page, text) for page, _, text in blocks("yaml")]
)
def test_a_shown_recipe_is_one(page, text, tmp_path):
    shown = yaml.safe_load(text)
    if isinstance(shown, list):
        text = yaml.safe_dump(AROUND | {"stages": shown})
    recipe = tmp_path / "shown.yaml"
    recipe.write_text(text)
    assert plan(load_recipe(recipe, [])).steps


def test_the_page_of_keys_is_made_of_the_schema():
    assert PAGES["docs/recipes.md"] == markdown(), (
        "lmx schema --markdown > docs/recipes.md"
    )


def test_links_lead_somewhere():
    for page, text in PAGES.items():
        for path, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), f"{page}: {path}"
            assert not anchor or anchor in anchors(target), f"{page}: {path}#{anchor}"


def anchors(page: Path) -> set[str]:
    """What a link may name in a page, as GitHub makes it of the headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def test_every_page_is_linked_from_the_readme():
    assert all(f"]({page})" in README for page in PAGES if page != "README.md")


def test_the_main_job_ends_with_the_table_and_a_model(workplace):
    text = (workplace / "exports/qat_4bit/log.txt").read_text()
    assert re.search(r"base +tuned +quantized", text)
    assert (workplace / "exports/qat_4bit/model/model.safetensors").is_file()


def test_programs_are_run_as_they_were_installed():
    assert set(RUN) >= INSTALLED


def test_ci_installs_and_tests_as_the_readme_says():
    script = (ROOT / ".ci/run").read_text()
    shown = [c for c in TESTED if "pytest" in c]
    assert shown == ["python -m pytest -n 2"]
    assert shown[0] in script
    assert 'pip install -e ".[test]"' in README
    assert '-e ".[test' in script


def test_the_shown_recipe_is_the_shipped_one_with_other_words():
    shown = yaml.safe_load(re.search(r"```yaml\n(.*?)```", README, re.DOTALL)[1])
    shipped = yaml.safe_load((ROOT / "recipes/qat_4bit.yaml").read_text())
    trained, shipped_trained = shown["stages"][0], shipped["stages"][0]
    assert trained["train"].items() <= shipped_trained["train"].items()
    assert shown["stages"][1:] == shipped["stages"][1:]
    assert shown["data"] == shipped["data"]


def test_every_recipe_is_named():
    names = set(re.findall(r"`recipes/(\w+)\.yaml`", README))
    assert names == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
