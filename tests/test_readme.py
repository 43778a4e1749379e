"""Every command the README shows is run, and what it says of recipes is so."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent
SMALL = [
    "stages.train.steps=2",
    "stages.train.batch_size=4",
    "stages.train.evaluate_batches=1",
    "stages.validate.tokens=200",
    "stages.validate.questions=21",
    "stages.validate.speed_tokens=8",
]
SMALL_BENCHMARKS = {
    "train_step": "--hidden 64 --layers 1 --batch 2 --length 32 --steps 3 --rounds 1",
    "finetune": "--hidden 64 --layers 1 --limit 16 --rounds 1 --no-stock",
    "ptq_large": "--hidden 128 --intermediate 256 --layers 3 --heads 2 "
    "--key-value-heads 2 --vocabulary 512 --calibration 1024 --whole",
    "qat_step": "--hidden 64 --layers 1 --vocabulary 512 --batch 2 --length 32 "
    "--steps 3 --grids minmax learned",
    "qat_quality": "--seeds 1 --bits 2 --steps 2 --batch 4 --tune 1 "
    "--calibration 1024 --routes 'rtn of the twin' 'qat minmax'",
    "generate": "--hidden 64 --layers 1 --vocabulary 512 --prompt 32 --tokens 8 "
    "--rows 3 --sampled 0 --rounds 1",
}
SMALL_BENCH = ["--tokens=8", "--repeats=1", "--prompt-lengths=16"]


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.partition("  #")[0].strip() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder where the main job was run as the README says, but for its length."""
    folder = tmp_path_factory.mktemp("workplace")
    done = run("lmx-train recipes/qat_4bit.yaml", folder)
    assert done.returncode == 0, done.stderr
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    said, _, command = command.rpartition(" | ")
    program, *arguments = shlex.split(command)
    if program == "lmx-train" and not any(a.startswith("--") for a in arguments):
        arguments += [a for a in SMALL if a.partition("=")[0] not in command]
    if arguments[0] == "bench":
        arguments += SMALL_BENCH
    if program == "python":
        arguments += shlex.split(SMALL_BENCHMARKS[Path(arguments[0]).stem])
    ours = re.compile(r"(?:^|(?<=\+))(?=recipes/|benchmarks/|data/)")
    arguments = [ours.sub(f"{ROOT}/", argument) for argument in arguments]
    return subprocess.run(
        [BIN / program, *arguments],
        cwd=folder,
        input=said and shlex.split(said)[1],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def main_part(command: str) -> str:
    """What is left of a line when the installing is done."""
    command = command.split(" && ")[-1]
    return re.sub(r"^(uv run (--extra test )?|\.venv/bin/)", "", command)


TESTED = sorted({main_part(command) for command in commands()})


@pytest.mark.parametrize("command", [c for c in TESTED if "pytest" not in c])
def test_a_shown_command_works(command, workplace):
    done = run(command, workplace)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_main_job_ends_with_the_table_and_a_model(workplace):
    text = (workplace / "exports/qat_4bit/log.txt").read_text()
    assert re.search(r"base +tuned +quantized", text)
    assert (workplace / "exports/qat_4bit/model/model.safetensors").is_file()


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
