"""Commands and recipes in README and docs/ work, and the pages are consistent.

A second word in the info string of a block, as in "bash network", marks commands that a
test cannot run: they need another machine, the Hub or hours. Such commands are parsed
up to the point where their work begins. The commands of a page in blocks "bash steps"
run one after the other, in an empty folder.
"""

import ast
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from inspect import cleandoc
from pathlib import Path

import lmx
import pytest
import warm
import warm_benchmarks
import yaml
from lmx.cli import main
from lmx.cli.schema import markdown
from lmx.pipeline.plan import load, plan
from small_base import write_small_base

pytestmark = pytest.mark.fused

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "benchmarks/README.md",
    ]
}
# Their links are checked; their commands are not run.
OTHER_PAGES = [
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"benchmarks/results/{p.name}" for p in ROOT.glob("benchmarks/results/*.md")),
    "data/SOURCES.md",
    "docs/llms.txt",
    "tests/README.md",
]
MAX_README_LINES = 150
BIN = Path(sys.executable).parent
BLOCK = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```", re.DOTALL | re.MULTILINE)
STEPS = "steps"
# A training of the page, and a quantization, in seconds.
SMALL_STEPS = {
    "lmx-train tickets.yaml": "stages.train.epochs=0.1 stages.evaluate.num_tokens=200 "
    "stages.evaluate.exact_match.samples=4 stages.evaluate.max_tokens=8",
    "lmx quantize": "stages.quantize.calibration.num_tokens=1024 "
    "stages.evaluate.num_tokens=200 stages.evaluate.exact_match.samples=4 "
    "stages.evaluate.max_tokens=8",
}
# Run by test_recipes.py and test_benchmarks.py with their own settings.
RUN_ELSEWHERE = re.compile(
    r"lmx-train recipes/(?!qat_4bit)\w+\.yaml"
    r"|python benchmarks/(train_step|finetune|generate)\.py.*"
)
# Programs of other packages; tests/serving runs what they show.
SERVING = {"pip", "uv", "curl", "nginx", "caddy", "litellm", "lm_eval"}
EXTERNAL = (
    {
        "hf",
        "git",
        "python",
        "python3",
        "ollama",
        "llama-cli",
        "llama-server",
        "mlx.distributed_config",
    }
    | SERVING
    | {f"mlx_lm.{name}" for name in ("evaluate", "generate", "perplexity", "server")}
)
# Our programs and their entry points.
PROGRAMS = {"lmx": "main", "lmx-train": "train"}
ENTRY_POINT = "import sys; from lmx.cli import main as cli; sys.exit(cli.{}())"
# Started as installed. The others run in the fork server, which is four times as fast.
INSTALLED = {
    "lmx-train recipes/qat_4bit.yaml",
    "lmx-train --list",
    "lmx schema adapter",
    "lmx doctor",
    "lmx generate exports/qat_4bit "
    '--prompt "Dim the kitchen lamp to 30 at half past seven"',
}
# The functions that begin the work of a command.
WORK = (
    "pipeline.runner.run",
    "cli.generate.generate",
    "cli.convert.convert",
    "cli.runs.push",
    "cli.serve.serve",
    "cli.bench.bench_load",
    "cli.doctor.doctor",
)
# The rest of a recipe that is shown as a list of stages.
RECIPE = {
    "model": "data/tiny-base",
    "data": {"train": "data/skills/train.jsonl", "valid": "data/skills/valid.jsonl"},
}
FEW_EXAMPLES = "data.max_samples=200"
SMALL = [
    FEW_EXAMPLES,
    "stages.train.steps=2",
    "stages.train.batch_size=4",
    "stages.train.eval_batches=1",
    "stages.evaluate.num_tokens=200",
    "stages.evaluate.exact_match.samples=2",
    "stages.evaluate.num_samples=1",
    "stages.evaluate.latency_tokens=8",
    # Two steps do not teach the included task.
    "stages.evaluate.thresholds.max_perplexity_ratio=3",
]
SMALL_BENCHMARKS = {
    "ptq_time": "--hidden-size 64 --num-layers 1 --vocab-size 320 --num-tokens 256 "
    "--seq-length 64",
    "qat_step": "--hidden-size 64 --num-layers 1 --vocab-size 512 --batch-size 2 "
    "--seq-length 32 --steps 3 --documents 2 --quantizers minmax fixed_codes",
    "qat_quality": "--model small-base --seeds 1 --grids 2 nvfp4 --steps 2 "
    "--batch-size 4 --max-samples 40 "
    "--num-calibration-tokens 1024 --methods rtn 'qat minmax'",
    "draft_quality": "--model small-base --seeds 1 --num-prompts 8 "
    "--num-eval-prompts 4 --num-test-prompts 2 --max-tokens 8 --steps 2 "
    "--batch-tokens 512 --num-layers 1",
}
SMALL_BENCH = ["--tokens=8", "--repeats=1", "--prompt-lengths=16"]


# What a shown program runs after: recipe files get the small settings.
SMALL_RUNS = """
import lmx

def train(recipe, *, overrides=None, real=lmx.train, **options):
    if isinstance(recipe, str):
        small = [a for a in {small} if a.partition("=")[0] not in (overrides or {{}})]
        recipe = lmx.Recipe(recipe, overrides=[*small, "stages.train.adapter.rank=2"])
        overrides = {{key: min(v, 2) for key, v in (overrides or {{}}).items()}}
    return real(recipe, overrides=overrides, **options)

lmx.train = train
"""


def blocks(language: str) -> list[tuple[str, str, str]]:
    """Page, second word and text of every code block in a language."""
    return [
        (page, mark, text)
        for page, content in PAGES.items()
        for block_language, mark, text in BLOCK.findall(content)
        if block_language == language
    ]


def commands(*, marked: bool) -> list[str]:
    """Commands in blocks with a second word, or in blocks without one."""
    lines = [
        (bool(mark), line.partition("  #")[0].strip())
        for _, mark, text in blocks("bash")
        for line in text.splitlines()
        if line.strip() and mark != STEPS
    ]
    return [
        line.partition(" # ")[0].strip()
        for is_marked, line in lines
        if is_marked == marked
    ]


def without_installation(command: str) -> str:
    """The last command of a line."""
    return command.split(" && ")[-1]


SHOWN = sorted({without_installation(command) for command in commands(marked=False)})
RUN = [c for c in SHOWN if "pytest" not in c and not RUN_ELSEWHERE.fullmatch(c)]
PARSED = sorted({*commands(marked=True), *filter(RUN_ELSEWHERE.fullmatch, SHOWN)})


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A folder with the runs of the main job and of LoRA, with few steps."""
    folder = tmp_path_factory.mktemp("workspace")
    for command in ("lmx-train recipes/qat_4bit.yaml", "lmx-train recipes/lora.yaml"):
        process = run(command, folder)
        assert process.returncode == 0, process.stderr
    # The benchmarks' model.
    write_small_base(folder / "small-base")
    # The name that --restart gives to an earlier run.
    runs = folder / "exports"
    shutil.copytree(runs / "qat_4bit", runs / "qat_4bit.old-1")
    return folder


def run(shown: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a shown command, with small settings, in `folder`."""
    echo, _, command = shown.rpartition(" | ")
    program, *arguments = shlex.split(command)
    if program == "lmx-train" and not any(a.startswith("--") for a in arguments):
        arguments += [a for a in SMALL if a.partition("=")[0] not in command]
    if program == "lmx-train" and "--dry-run" in arguments:
        arguments.append(FEW_EXAMPLES)
    if arguments[0] == "bench":
        arguments += SMALL_BENCH
    if program == "python":
        arguments += shlex.split(SMALL_BENCHMARKS[Path(arguments[0]).stem])
    in_checkout = re.compile(r"(?:^|(?<=\+))(?=recipes/|benchmarks/|data/)")
    arguments = [in_checkout.sub(f"{ROOT}/", argument) for argument in arguments]
    stdin = echo and shlex.split(echo)[1]
    if program == "python":
        path, *arguments = arguments
        return warm_benchmarks.run(Path(path), *arguments, cwd=folder)
    if program in PROGRAMS and shown not in INSTALLED:
        entry_point = ENTRY_POINT.format(PROGRAMS[program])
        return warm.run(entry_point, *arguments, cwd=folder, stdin=stdin, timeout=240)
    return subprocess.run(
        [BIN / program, *arguments],
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_shown_command_runs(command, workspace):
    process = run(command, workspace)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository to clone")
def test_installation_begins_with_an_active_environment_in_the_checkout(tmp_path):
    [shown] = [text for page, mark, text in blocks("bash") if mark == "install"]
    script = f'{shown}\necho "$PWD"\necho "$VIRTUAL_ENV"'
    script = script.replace("clone REPOSITORY", f"clone -q --depth 1 file://{ROOT}")
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    folder = tmp_path / "lmx"
    assert done.stdout.splitlines() == [f"{folder}", f"{folder}/.venv"]
    assert (folder / "pyproject.toml").is_file()


@pytest.mark.slow
def test_steps_from_a_table_to_a_server_run(tmp_path):
    """Each step needs the ones before it; the last one asks the server."""
    steps = [
        line
        for page, mark, text in blocks("bash")
        if mark == STEPS and page == "docs/own_task.md"
        for line in text.splitlines()
    ]
    assert [shlex.split(step)[0] for step in steps] == [
        *("lmx", "lmx-train", "lmx-train", "lmx", "lmx", "lmx", "curl")
    ]
    *commands, serve, ask = steps
    for command in commands:
        is_run, small = "--dry-run" not in command, ""
        for start, settings in SMALL_STEPS.items():
            small += settings * (is_run and command.startswith(start))
        program, *arguments = shlex.split(f"{command} {small}")
        entry_point = ENTRY_POINT.format(PROGRAMS[program])
        process = warm.run(entry_point, *arguments, cwd=tmp_path, timeout=300)
        assert process.returncode == 0, process.stderr
        assert process.stdout.strip()
        if "--dry-run" in arguments:
            assert " 3.0 epochs" in process.stdout
    for name in ("tickets", "tickets_4bit"):
        log = (tmp_path / "exports" / name / "log.txt").read_text()
        assert "exact match, set " in log
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program, *arguments = shlex.split(serve)
    entry_point = ENTRY_POINT.format(PROGRAMS[program])
    server = warm.Process(entry_point, *arguments, "--port", port, cwd=tmp_path)
    request = shlex.split(
        ask.replace("8080", port).replace("}]", '}], "max_tokens": 8')
    )
    try:
        for _ in range(600):
            answer = subprocess.run(
                [*request, "--silent"], capture_output=True, text=True, check=False
            )
            if answer.stdout:
                break
            assert server.poll() is None, server.result(1)
            time.sleep(0.1)
    finally:
        os.kill(server.pid, signal.SIGTERM)
    [choice] = json.loads(answer.stdout)["choices"]
    assert choice["message"]["role"] == "assistant"
    assert server.result(60).returncode == 0


def recorded(program: str) -> str:
    """The program, which fails at its end if one of its statements did not run."""
    tree, waiting = ast.parse(program), {}
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            # That of a lambda is an expression.
            for statement in list(block) if isinstance(block, list) else []:
                number = len(waiting)
                waiting[number] = ast.unparse(statement)
                [note] = ast.parse(f"WAITING.pop({number}, None)").body
                block.insert(block.index(statement), note)
    end = "assert not WAITING, f'never ran: {WAITING}'"
    return "\n".join([f"WAITING = {waiting!r}", ast.unparse(tree), end])


def test_statement_that_never_runs_is_seen():
    start = "def f(x):\n    return x\n"
    exec(recorded(f"{start}for n in 0, 1:\n    if f(n): f(2)\n    else: f(3)"), {})
    for rest in ("", "try: f(1)\nexcept ValueError: f(3)", "if f(0): f(4)"):
        with pytest.raises(AssertionError, match=r"never ran: .*(return x|f\([34]\))"):
            exec(recorded(start + rest), {})


def shown_programs() -> dict[str, str]:
    """The blocks of a page, one after the other; and that of the package."""
    [(_, _, package)] = BLOCK.findall(lmx.__doc__)
    programs = {"lmx": package}
    for page, mark, text in blocks("python"):
        if not mark:
            programs[page] = programs.get(page, "") + text
    return programs


@pytest.mark.slow
@pytest.mark.parametrize("page", shown_programs())
def test_every_line_of_a_shown_program_runs(page, tmp_path):
    model = write_small_base(tmp_path / "small-base")
    shown = recorded(shown_programs()[page]).replace("data/tiny-base", str(model))
    program = SMALL_RUNS.format(small=[f"model={model}", *SMALL]) + shown
    process = warm.run(program, cwd=tmp_path, timeout=400)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip()


@pytest.mark.parametrize(
    "text", [text for _, mark, text in blocks("python") if mark == "rewards"]
)
def test_shown_rewards_are_numbers(text):
    exec(text, names := {})
    rewards = [value for name, value in names.items() if name != "__builtins__"]
    assert rewards
    for reward in rewards:
        assert isinstance(reward("2 + 1?", "three", "3"), float | int)


def test_programs_of_the_public_docstrings_run():
    """The API reference shows them."""
    texts = [getattr(lmx, name).__doc__ for name in lmx.__all__]
    shown = [text for _, _, text in BLOCK.findall("\n".join(map(cleandoc, texts)))]
    assert shown
    for program in shown:
        exec(program, {name: getattr(lmx, name) for name in lmx.__all__})


@pytest.mark.parametrize("command", PARSED)
def test_marked_command_is_parsed(command, monkeypatch):
    calls = []
    for function in WORK:
        monkeypatch.setattr(f"lmx.{function}", lambda *_, **__: calls.append(1) or 0)
    program, *arguments = shlex.split(command.rpartition(" -- ")[2])
    if program == "python":
        assert (ROOT / arguments[0]).is_file()
    if program not in EXTERNAL:
        entry_point = {"lmx": main.main, "lmx-train": main.train}[program]
        assert entry_point(arguments) == 0
        assert calls


@pytest.mark.parametrize(
    ("page", "text"), [(page, text) for page, _, text in blocks("yaml")]
)
def test_shown_recipe_is_valid(page, text, tmp_path):
    shown = yaml.safe_load(text)
    if isinstance(shown, list):
        text = yaml.safe_dump(RECIPE | {"stages": shown})
    recipe = tmp_path / "shown.yaml"
    recipe.write_text(text)
    assert plan(load(recipe)).stages


def test_recipe_reference_is_up_to_date():
    assert PAGES["docs/recipes.md"] == markdown(), (
        "run: lmx schema --markdown > docs/recipes.md"
    )


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES])
def test_links_exist(page):
    text = (ROOT / page).read_text()
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes from the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def test_first_page_links_every_page():
    assert {"](docs/index.md)", "](docs/methods.md)"} <= {
        f"]({path})" for path in re.findall(r"\]\(([^)#]+)\)", README)
    }
    names = {Path(page).name for page in PAGES if page.startswith("docs/")}
    assert all(f"]({name})" in PAGES["docs/index.md"] for name in names - {"index.md"})


def test_readme_is_short():
    assert len(README.splitlines()) <= MAX_README_LINES


@pytest.mark.slow
def test_main_job_ends_with_a_table_and_a_model(workspace):
    text = (workspace / "exports/qat_4bit/log.txt").read_text()
    assert re.search(r"base +fine-tuned +quantized", text)
    assert (workspace / "exports/qat_4bit/model/model.safetensors").is_file()


def test_installed_programs_are_shown():
    assert set(RUN) >= INSTALLED


def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci/run").read_text()
    shown = [command for command in SHOWN if "pytest" in command]
    assert shown == ["python -m pytest"]
    assert shown[0] in script
    assert 'pip install -e ".[test]"' in README
    assert '-e ".[test' in script


def test_readme_recipe_is_the_included_one():
    shown = yaml.safe_load(re.search(r"```yaml\n(.*?)```", README, re.DOTALL)[1])
    included = yaml.safe_load((ROOT / "recipes/qat_4bit.yaml").read_text())
    shown_train, train = shown["stages"][0]["train"], included["stages"][0]["train"]
    assert shown_train.items() <= train.items()
    assert shown["stages"][1:] == included["stages"][1:]
    assert shown["data"] == included["data"]


def test_readme_lists_every_recipe():
    names = set(re.findall(r"`recipes/(\w+)\.yaml`", README))
    assert names == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}


def test_contributing_names_existing_places():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`((?:\w+/)+\w+\.\w+)`", text))
    assert "quantization/ptq/methods.py" in paths
    for path in paths:
        assert (ROOT / "toolkit/lmx" / path).is_file() or (ROOT / path).is_file(), path
    for name, path in re.findall(r"`([A-Z]\w+)` in `([\w/]+\.py)`", text):
        source = (ROOT / "toolkit/lmx" / path).read_text()
        assert re.search(rf"^(class )?{name}\b", source, re.MULTILINE), name
