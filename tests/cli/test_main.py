"""lmx-train and lmx: options, hints, completion, exit codes and import time."""

import resource
import shutil
import subprocess
import sys
import types
from pathlib import Path

import lmx
import pytest
from lmx import pipeline
from lmx.cli import main
from lmx.config import bundled
from lmx.config.key_hints import tables
from lmx.errors import Interrupted, UserError
from lmx.run.terminal import printable

GOOD = """\
model: a/b
data: {train: builtin:stdlib}
stages: [{train: {steps: 1, batch_size: 8}}]
"""
HEAVY = ("mlx_lm", "transformers", "datasets", "wandb", "rich", "numpy")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return str(path)


@pytest.fixture
def calls(monkeypatch):
    """What the runner and the preflight were called with."""
    calls = []

    def run(loaded, plan, **flags):
        calls.append((loaded.recipe.seed, plan.output.name, flags))
        return 0

    for name, function in (("runner", "run"), ("dry_run", "dry_run")):
        module = types.ModuleType(f"lmx.pipeline.{name}")
        setattr(module, function, run)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(pipeline, name, module, raising=False)
    return calls


def test_train_accepts_options_anywhere(recipe, calls):
    assert main.train([recipe, "--quiet", "seed=4", "--ignore-limits"]) == 0
    command = f"lmx-train {recipe} seed=4 --ignore-limits"
    flags = {"restart": False, "ignore_limits": True, "quiet": True, "command": command}
    assert calls[0][2].pop("extensions").allow_python is False
    assert calls == [(4, "good", flags)]


def test_options_run_their_recipe_which_resumes(recipe, calls, capsys):
    words = ["--model=a/b", "--data=builtin:stdlib", "--steps=1", "seed=4"]
    assert main.train([*words, "--output=here"]) == 0
    assert (calls[0][0], calls[0][1]) == (4, "here")
    assert calls[0][2]["command"] == "lmx-train here/recipe.yaml output=here"
    # The recipe is printed.
    assert capsys.readouterr().out.startswith("model: a/b\ndata:\n  train: builtin:std")


def test_python_files_need_a_flag_that_resuming_repeats(recipe, calls):
    assert main.train([recipe, "--allow-python"]) == 0
    flags = calls[0][2]
    assert flags["extensions"].allow_python is True
    assert flags["command"] == f"lmx-train {recipe} --allow-python"
    # A quantize stage has no reward.
    with pytest.raises(SystemExit):
        main.main(["quantize", "--model", "M", "--allow-python"])


def test_dry_run_runs_nothing(recipe, calls):
    assert main.train(["--dry-run", recipe]) == 0
    assert calls == [(0, "good", {"ignore_limits": False})]


def test_lmx_train_verb_is_lmx_train(recipe, calls):
    assert main.main(["train", recipe, "seed=7"]) == 0
    assert calls[0][0] == 7


def test_recipe_errors_exit_2_without_traceback(recipe, calls, capsys):
    assert main.train([recipe, "sed=1"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "argument 'sed=1': unknown key 'sed'\n"
        "    hint: did you mean 'seed'?\n"
        "1 problem; nothing was run.\n"
    )
    assert calls == []


def test_debug_shows_the_traceback(recipe, capsys):
    assert main.train([recipe, "sed=1", "--debug"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("a threshold was missed", code=1), 1, "a threshold was missed\n"),
        (
            UserError("too large", code=3, hint="--ignore-limits"),
            3,
            "too large\n    hint: ",
        ),
        (KeyboardInterrupt(), 130, ""),
        (Interrupted("to go on: lmx-train x"), 130, "to go on: lmx-train x\n"),
    ],
)
def test_exit_codes(recipe, calls, capsys, monkeypatch, error, code, text):
    def run(*_, **__):
        raise error

    monkeypatch.setattr(sys.modules["lmx.pipeline.runner"], "run", run)
    assert main.train([recipe]) == code
    assert capsys.readouterr().err.startswith(text)


def error_of(capfd, recipe: str, line: str, arguments: list[str]) -> str:
    """What a recipe with one more line, or a command, prints as its error."""
    with open(recipe, "a") as file:
        file.write(line + "\n")
    try:
        code = main.train([recipe, *arguments])
    except SystemExit as usage:
        code = usage.code
    printed = capfd.readouterr()
    assert (code, printed.out) == (2, "")
    return printed.err


# In YAML, \\e is ESC and \\x9B its 8-bit form.
HOSTILE = r"\e[2J\e]0;title\x07\x9B31m\u202E"
LONG = "x" * 5000
LINES = '"' + "x\\n" * 5000 + '"'


@pytest.mark.parametrize(
    ("recipe_line", "arguments"),
    [
        (f'"{HOSTILE}seed": 1', []),
        (f'seed: "{HOSTILE}"', []),
        (f'tracker: {{type: "{HOSTILE}"}}', []),
        ("", [f'seed="{HOSTILE}"']),
        ("", ["\x1b[31mseed\x9b=1"]),
        ("", ["--\x1b[31mfast\x9b"]),
        ("", ["seed=x\x1b[31m\x9b", "--debug"]),
        (f"{LONG}: 1", []),
        (f"seed: {LONG}", []),
        (f"seed: !!int {LONG}", []),
        (f"tracker: {{type: {LONG}}}", []),
        (f"? [{LONG}]\n: 1", []),
        ("", [f"{LONG}=1"]),
        ("", [f"seed={LONG}"]),
        ("", [f"--{LONG}"]),
        ("", [f"model={LONG}/x/y"]),
        ("", [f"data.train=builtin:{LONG}"]),
        (f"? {LINES}\n: 1", []),
        (f"seed: {LINES}", []),
    ],
)
def test_errors_are_printable_and_short(recipe, capfd, recipe_line, arguments):
    error = error_of(capfd, recipe, recipe_line, arguments)
    assert len(error) > 20
    assert printable(error) == error
    is_long = "x" * 20 in f"{recipe_line}{arguments}"
    assert ("x" * 20 in error) == is_long
    assert "x" * 301 not in error
    if "--debug" not in arguments:
        assert len(error) < 2000
        assert error.count("\n") < 40


def test_errors_about_a_path_called_secret_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").mkdir()
    assert main.main(["generate", "./secret", "--prompt", "a"]) == 2
    message = "this folder is not a model: it has no config.json"
    assert capsys.readouterr().err == f"secret: {message}\n"


@pytest.mark.parametrize("argv", [[], ["x.yaml", "--chek"], ["--che", "x.yaml"]])
def test_usage_error_exits_2(argv):
    with pytest.raises(SystemExit) as caught:
        main.train(argv)
    assert caught.value.code == 2


HINTS = {
    "train r --overwrite --force": [
        "--overwrite is called --restart",
        "--force is called --ignore-limits",
    ],
    "train --model m --lr 1 --iters=5": [
        "--lr is called --learning-rate",
        "--iters is called --steps",
    ],
    "quantize --q-bits 3": ["--q-bits is called --bits"],
    "import a b": ["import is called convert"],
    "generate m --prompt x --adapter=a --draft b": [
        "--adapter is called --adapter-path",
        "--draft is called --draft-model",
    ],
    "generate m --max_new_tokens 5": ["called --max-tokens"],
    # No verb has the first, another verb has the second.
    "train recipe --no-such-option": [],
    "train recipe --speculative-model=m": [],
}


@pytest.mark.parametrize(("words", "hints"), HINTS.items())
def test_names_of_other_tools_get_the_name_here(words, hints, capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(words.split())
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("hint:") == len(hints)
    assert all(f"{hint} here" in error for hint in hints)


ADVICE = {
    "train r --device gpu": "--device: MLX takes the GPU",
    "train r --gpus=2": "--gpus: start several processes",
    "serve m --max-model-len 4096": "--max-model-len: the context is the model's",
    "serve m --gpu-memory-utilization=0.9": "--kv-memory GB",
    "fuse --model m": "fuse: a run merges its adapter",
    "eval m": "eval: an evaluate stage",
    "tarin r.yaml": "there is no verb 'tarin'\n    hint: did you mean 'train'?",
    "genrate m": "did you mean 'generate'?",
}


@pytest.mark.parametrize(("words", "hint"), ADVICE.items())
def test_what_lmx_does_not_need_gets_advice(words, hint, capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(words.split())
    assert caught.value.code == 2
    usage, *error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: lmx")
    assert "--help" in usage
    assert hint in "\n".join(error)
    assert len(error) <= 2


def test_advice_is_about_no_name_of_lmx():
    for verb in main.VERBS:
        known = {*main.verb_parser(verb)._option_string_actions, *main.VERBS}
        assert not known & tables()["advice"].keys()


def test_every_verb_takes_a_model_as_word_and_option(monkeypatch):
    """What reaches the verb is the same."""
    rest = {"generate": "--prompt=a", "init": "--data=d seed=1", "convert": "new"}
    rest |= {"quantize": "--bits=3 seed=1", "train": "--data=d seed=1", "push": "a/b"}
    seen = []
    for module in ("generate", "serve", "bench", "convert"):
        monkeypatch.setattr(f"lmx.cli.{module}.{module}", seen.append)
    monkeypatch.setattr("lmx.cli.runs.push", seen.append)

    def stop(arguments, kind="init"):
        seen.append(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr("lmx.cli.main.execute", stop)
    monkeypatch.setattr("lmx.cli.execution.execute", stop)
    monkeypatch.setattr("lmx.models.checkpoint.model_folder", stop)
    for verb in (*main.MODEL_VERBS, "init", "quantize", "train"):
        options = rest.get(verb, "").split()
        forms = [["m", *options], ["--model", "m", *options]]
        forms += [["--model=m", *options], [*options, "-m", "m"]]
        seen.clear()
        for form in forms:
            main.main([verb, *form])
        assert len(seen) == len(forms), verb
        if verb != "init":
            assert all(vars(each) == vars(seen[0]) for each in seen), verb
        else:
            assert seen == ["m"] * len(forms)


def test_hints_name_options_that_exist():
    helps = [main.verb_parser(verb).format_help() for verb in main.VERBS]
    known = " ".join([*helps, *main.VERBS])
    for name, [target] in tables()["options"].items():
        if not target.startswith("the recipe"):
            assert all(word in known for word in target.split()), name


@pytest.mark.parametrize("lengths", ["a,b", "32,", "0", "-1", "1.5", ""])
def test_invalid_lists_of_numbers_are_refused(lengths, capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(["bench", "m", f"--prompt-lengths={lengths}"])
    assert caught.value.code == 2
    expected = f"expected numbers from 1, such as 1,4,16; got {lengths!r}"
    assert expected in capsys.readouterr().err


BIN = Path(sys.executable).parent
# As bash calls the function after the tabulator key.
BASH = """\
for line in "$@"; do
    COMP_LINE=$line COMP_POINT=${#line} COMP_TYPE=9 COMPREPLY=()
    _python_argcomplete "${line%% *}"
    echo "${COMPREPLY[@]}"
done
"""


@pytest.mark.skipif(
    not shutil.which("bash") or not (BIN / "lmx").exists(), reason="needs both"
)
def test_completion_in_bash(tmp_path):
    (tmp_path / "qat_mine.yaml").touch()
    (tmp_path / "qat_other.txt").touch()
    import argcomplete

    script = argcomplete.shellcode(["lmx", "lmx-train"], shell="bash")
    lines = {
        "lmx rec": "recipes",
        "lmx recipes copy qat_4": "qat_4bit",
        "lmx-train qat_4bit stages.train.qat.bi": "stages.train.qat.bits=",
        # What follows are keys that the user chooses.
        "lmx-train qat_4bit stages.train.qat.ov": "stages.train.qat.overrides=",
        "lmx-train qat_m": "qat_mine.yaml",
        "lmx train qat_4bit --ig": "--ignore-limits",
    }
    done = subprocess.run(
        ["bash", "-c", script + BASH, "bash", *lines],
        env={"PATH": f"{BIN}:/usr/bin:/bin", "COMP_WORDBREAKS": " \t\n\"'><=;|&(:"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    printed = done.stdout.replace(" \n", "\n").splitlines()
    assert printed == [*lines.values()], done


@pytest.mark.parametrize("program", [main.train, main.main])
def test_version(program, capsys):
    with pytest.raises(SystemExit) as caught:
        program(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"lmx {lmx.__version__}\n"


@pytest.fixture
def recipe_folder(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "qat_4bit.yaml").write_text(
        f"# Learn the rounding.\n{GOOD}"
    )
    monkeypatch.setattr(bundled, "BUNDLED", tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)


@pytest.mark.parametrize("name", ["qat_4bit", "recipes/qat_4bit.yaml"])
def test_bundled_recipe_by_name(recipe_folder, calls, name):
    assert main.train([name]) == 0
    assert calls[0][1] == "qat_4bit"


def test_unknown_recipe_hints_at_the_nearest(recipe_folder, capsys):
    assert main.train(["qat_4bits"]) == 2
    assert capsys.readouterr().err == (
        "no such recipe: 'qat_4bits'\n    hint: did you mean 'qat_4bit'?\n"
    )
    Path("orders.yaml").write_text("{}")
    assert main.train(["orders.yml"]) == 2
    assert "did you mean 'orders.yaml'?" in capsys.readouterr().err
    assert main.train(["."]) == 2
    assert "this is a folder" in capsys.readouterr().err


def test_list_prints_recipes_stages_and_methods(recipe_folder, capsys):
    assert main.train(["--list"]) == 0
    printed = capsys.readouterr().out
    assert "  qat_4bit  Learn the rounding.\n" in printed
    for word in ("  rtn  ", "  mlx  ", "  quantize  "):
        assert word in printed


def imported(code: str, *arguments: str) -> list[str]:
    """Heavy modules in a fresh interpreter that ran `code`."""
    report = f"import sys\n{code}\nprint(*[m for m in {HEAVY} if m in sys.modules])"
    command = [sys.executable, "-c", report, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split() if done.stdout.strip() else []


def test_bad_recipe_imports_nothing_heavy(recipe):
    code = (
        "from lmx.cli import main as cli\n"
        "assert cli.train([sys.argv[1], 'sed=1']) == 2, 'a fault'"
    )
    assert imported(code, recipe) == []
    # The check itself can fail.
    assert imported("import numpy") == ["numpy"]


def test_help_does_not_import_the_schema():
    code = (
        "from lmx.cli import main as cli\n"
        "try: cli.train(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'pydantic', 'mlx.core', 'yaml', 'argcomplete'} & set(sys.modules)"
    )
    assert imported(code) == []


@pytest.mark.parametrize(("argument", "limit"), [("--help", 0.3), ("sed=1", 0.5)])
def test_command_starts_fast(recipe, argument, limit):
    code = "import sys; from lmx.cli.main import train; sys.exit(train(sys.argv[1:]))"
    times = []
    for _ in range(2):
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", code, recipe, argument]
        subprocess.run(command, capture_output=True, check=False)
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime)
    # Of the processor; four times the documented limit, as the machine may be busy.
    assert min(times) < 4 * limit


@pytest.mark.parametrize("argv", [["--help"], ["bogus"]])
def test_lmx_lists_its_verbs(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(argv)
    assert caught.value.code == (0 if argv == ["--help"] else 2)
    printed = capsys.readouterr()
    assert all(v in printed.out + printed.err for v in ("train", "generate", "doctor"))


TOO_LONG, NOBODY = "x" * 300, "~nobody-of-this-name/x"


def test_names_that_are_no_path(make_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(make_checkpoint())
    for name in (TOO_LONG, NOBODY):
        for words in (
            ["generate", name, "--prompt", "a"],
            ["bench", name],
            ["convert", name, "target"],
            ["push", name, "user/name"],
            ["report", name],
            ["generate", model, "--prompt", "a", "--adapter-path", name],
            ["generate", model, "--prompt", "a", "--draft-model", name],
            ["generate", model, "--prompt", "a", "--prompt-cache-file", name],
        ):
            assert main.main(words) == 2, words


def test_a_prompt_cache_of_a_long_name(make_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--prompt", "a", "--max-tokens", "1", "--save-prompt-cache", TOO_LONG]
    assert main.main(["generate", str(make_checkpoint()), *options]) == 1


@pytest.mark.parametrize("verb", ["quantize --model {} --dry-run", "init --model {}"])
def test_a_deleted_working_directory_is_one_sentence(
    verb, tmp_path, monkeypatch, capsys
):
    model = bundled.bundled_data(Path("data/tiny-base")).absolute()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    task = ["--task", "quantize"] * verb.startswith("init")
    assert main.main([*verb.format(model).split(), *task]) == 1
    error = capsys.readouterr().err
    assert error.startswith("the working directory was deleted\n    hint: ")
    assert len(error.splitlines()) == 2
