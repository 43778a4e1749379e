"""`lmx recipes` and `lmx init`: recipes of the user's own."""

import io
import json
import re
import shutil
from itertools import product
from pathlib import Path

import exporting
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import packers
import pytest
from lmx.cli import main, recipes
from lmx.config import bundled
from lmx.config.bundled import SCHEMA_LINE
from lmx.config.overrides import merge
from lmx.config.yaml_io import read
from lmx.convert.exporters import gguf
from lmx.convert.importers import load_model
from lmx.pipeline import work
from lmx.pipeline.plan import load, plan
from mlx.utils import tree_flatten


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_recipes_lists_every_recipe_with_its_title(capsys):
    assert main.main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*bundled.bundled_recipes()]
    # The author's first comment, not the address of the schema.
    for line, path in zip(lines, bundled.bundled_recipes().values(), strict=True):
        schema, title, *_ = path.read_text().splitlines()
        assert path.parent / schema.removeprefix(SCHEMA_LINE) == bundled.schema_file()
        assert line.endswith(f"  {title.removeprefix('# ')}")
    assert bundled.schema_file().is_file()


@pytest.mark.parametrize("name", bundled.bundled_recipes())
def test_copied_recipe_works_in_any_folder(name, elsewhere, capsys):
    assert main.main(["recipes", "copy", name]) == 0
    text = (elsewhere / f"{name}.yaml").read_text()
    source = bundled.bundled_recipes()[name].read_text()
    # Only the address of the schema differs.
    assert text.splitlines()[1:] == source.splitlines()[1:]
    assert text.startswith(f"{SCHEMA_LINE}file://")
    loaded = load(f"{name}.yaml")
    assert plan(loaded).stages
    if loaded.recipe.model.path:
        assert loaded.find("data/tiny-base") == bundled.BUNDLED / "data/tiny-base"


def test_own_files_go_before_those_of_lmx(elsewhere):
    main.main(["recipes", "copy", "lora"])
    (elsewhere / "data/tiny-base").mkdir(parents=True)
    config = elsewhere / "data/tiny-base/config.json"
    config.write_text('{"model_type": "llama"}')
    found = load("lora.yaml").find("data/tiny-base")
    assert found.resolve() == elsewhere / "data/tiny-base"
    assert load("lora.yaml").find("recipes/lora.yaml") is None


def test_recipes_and_init_never_overwrite(elsewhere, capsys):
    (elsewhere / "mine").mkdir()
    assert main.main(["recipes", "copy", "lora", "mine"]) == 0
    assert (elsewhere / "mine/lora.yaml").is_file()
    (elsewhere / "a.yaml").write_text("mine")
    assert main.main(["recipes", "copy", "lora", "a.yaml"]) == 2
    error = capsys.readouterr().err
    assert "a.yaml: the file exists" in error
    assert "--output FILE" in error
    arguments = ["--model", "a/b", "--data", "c/d", "--output", "a.yaml"]
    assert main.main(["init", *arguments]) == 2
    assert (elsewhere / "a.yaml").read_text() == "mine"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main.main(["recipes", "copy", "no_such"])
    assert "qat_4bit" in capsys.readouterr().err


TEXT = """\
# A title.
model: a/b  # the model
data: {train: [x, y], max_seq_length: 8}
stages:
  - train: {steps: 1, batch_size: 2}  # first
  - quantize:
      bits: 4 # second
      calibration: {max_seq_length: 8}
"""


def test_changed_values_leave_comments_and_layout():
    text = recipes.set_value(TEXT, ("model",), "c d/e")
    path = ("stages", 0, "train", "batch_size")
    text = recipes.set_value(text, path, 7, key="batch_tokens")
    calibration = ("stages", 1, "quantize", "calibration")
    text = recipes.set_value(text, calibration, {"num_tokens": 9})
    expected = TEXT.replace("a/b", "c d/e").replace("batch_size: 2", "batch_tokens: 7")
    assert text == expected.replace("{max_seq_length: 8}\n", "{num_tokens: 9}\n")
    last = "      calibration: {max_seq_length: 8}\n"
    assert recipes.without_key(TEXT, calibration) == TEXT.removesuffix(last)
    with pytest.raises(AssertionError):
        recipes.without_key(TEXT, calibration[:-1])


VALUES = [
    "a, b", "x: y", "{a}", "# x", "1e-5", "yes", "null", "", "C:\\x", "Ünï", "a\nb",
    ["a, b", 1], {"a": "x: y"}, None, True, 0.002,
]  # fmt: skip


@pytest.mark.parametrize("path", [("model",), ("data", "train")], ids=["block", "flow"])
def test_set_value_writes_the_value_itself(path):
    for value in VALUES:
        data = read(recipes.set_value(TEXT, path, value)).data
        expected = read(TEXT).data
        (expected if len(path) == 1 else expected["data"])[path[-1]] = value
        assert data == expected


def written(*arguments: str) -> dict:
    assert main.main(["init", *arguments, "--output", "my.yaml"]) == 0
    assert plan(load("my.yaml")).stages
    return read(open("my.yaml").read()).data


CASES = [
    *product(["qat", "quantize"], recipes.BITS),
    ("finetune", None),
    ("draft", None),
]


@pytest.mark.parametrize(("task", "bits"), CASES)
@pytest.mark.parametrize("model", ["owner/name", "data/tiny-base"])
def test_init_writes_a_valid_recipe(task, bits, model, elsewhere):
    options = ["--bits", str(bits)] if bits else []
    data = written("--task", task, "--model", model, "--data", "owner/set", *options)
    assert data["model"] == model
    assert data["data"]["train"] == "owner/set"
    assert "valid" not in data["data"]
    text = (elsewhere / "my.yaml").read_text()
    widths = {v for path, v in recipes._values(data) if path[-1] == "bits"}
    assert widths == ({bits} if bits else set())
    if bits:
        title = text.splitlines()[1]
        assert f"{bits}-bit" in title or f"{bits} bits" in title
    assert text.count("#") > 3
    values = {path[-1]: value for path, value in recipes._values(data)}
    if model == "owner/name" and task != "quantize":
        assert values["max_seq_length"] == 1024
        assert "batch_size" not in values
        assert values["learning_rate"] <= (1e-4 if task != "draft" else 1e-3)
        assert task != "finetune" or values["learning_rate"] == 1e-4
        assert "sample_prompts" not in values
    elif task in ("qat", "finetune"):
        assert values["batch_size"] in (4, 16, 64)


def test_init_without_options_of_bits_and_data(elsewhere):
    data = written("--task", "quantize", "--model", "owner/name")
    assert data["data"] == {"valid": "builtin:stdlib", "max_seq_length": 256}
    assert data["stages"][0]["quantize"]["bits"] == 4
    (elsewhere / "my.yaml").unlink()
    source = read(bundled.bundled_recipes()["qat_4bit"].read_text()).data
    included = ["--model", recipes.INCLUDED_MODEL, "--data", source["data"]["train"]]
    assert written(*included) == source


def write_table(name: str, header: str, *rows: str) -> None:
    Path(name).write_text("\n".join([header, *rows]) + "\n")


ANSWER = '"{""device"": ""lamp""}"'
USUAL_COLUMNS = [
    ("question,answer", {"prompt": "question", "completion": "answer"}),
    ("Input,Output", {"prompt": "Input", "completion": "Output"}),
    ("text,label", {"prompt": "text", "completion": "label"}),
    ("text,label,source", {"prompt": "text", "completion": "label"}),
    ("prompt,completion", None),
    ("instruction,output", None),
    ("text,title", None),
    ("message,label", {"prompt": "message", "completion": "label"}),
    ("title,body,label", {"prompt": "body", "completion": "label"}),
    # Of two columns one is the answer to the other.
    ("reply,email", {"prompt": "email", "completion": "reply"}),
    ("sentence,mood", {"prompt": "sentence", "completion": "mood"}),
    ("frage,antwort", {"prompt": "frage", "completion": "antwort"}),
]


@pytest.mark.parametrize(("header", "columns"), USUAL_COLUMNS)
def test_init_recognizes_the_usual_columns(header, columns, elsewhere, capsys):
    count = header.count(",")
    write_table("rows.csv", header, *[f"Lamp on.{',lamp' * count}"] * 30)
    data = written("--model", "a/b", "--data", "rows.csv")
    assert data["data"].get("columns") == columns
    shown = capsys.readouterr().out
    if columns:
        pairs = ", ".join(f"{name}: {column}" for name, column in columns.items())
        assert f"Columns of the data, guessed from names and order: {pairs}" in shown
    else:
        assert "Columns" not in shown


def test_numbers_are_no_answers_that_init_guesses(elsewhere):
    (elsewhere / "rows.jsonl").write_text('{"text": "a b c", "label": 1}\n' * 20)
    assert "columns" not in written("--model", "a/b", "--data", "rows.jsonl")["data"]


COLUMNS = ["--columns", "prompt=ticket,completion=answer_json"]
THREE, NAMED = "nummer,frage,antwort", ["--columns", "prompt=frage,completion=antwort"]


@pytest.mark.parametrize("task", [t for t in recipes.TASKS if t != "quantize"])
@pytest.mark.parametrize("model", ["a/b", "data/tiny-base"])
def test_init_fits_a_recipe_to_the_data(task, model, elsewhere, capsys):
    answer = json.dumps({"device": "lamp " * 30}).replace('"', '""')
    write_table("rows.csv", "ticket,answer_json", *[f'Lamp on.,"{answer}"'] * 200)
    options = ["--task", task, "--model", model, "--data", "rows.csv", *COLUMNS]
    data = written(*options, "seed=7", "stages.evaluate.latency_tokens=8")
    assert data["data"]["columns"] == {"prompt": "ticket", "completion": "answer_json"}
    assert data["seed"] == 7
    [evaluate] = [s["evaluate"] for s in data["stages"] if "evaluate" in s]
    assert evaluate["exact_match"] == {"samples": 120}
    # The answers are longer than the default.
    assert evaluate["max_tokens"] == (len(answer.replace('""', '"')) // 2 + 1)
    assert evaluate["latency_tokens"] == 8
    for stage in (s["train"] for s in data["stages"] if "train" in s):
        assert stage["epochs"] == 3
        assert "steps" not in stage
        # At most about 8 examples, whatever the model.
        assert stage.get("batch_size") in ((4, 8) if "tiny" in model else (None,))
        if "tiny" not in model:
            assert 8 * 50 < stage["batch_tokens"] < 8 * 100


def test_init_trains_less_after_the_first_training(elsewhere):
    write_table("rows.csv", "prompt,completion", *["Lamp on.,lamp"] * 30)
    data = written("--model", "a/b", "--data", "rows.csv", "--bits", "3")
    assert [s["train"]["epochs"] for s in data["stages"] if "train" in s] == [3, 1]


def test_init_asks_for_columns_at_a_terminal(elsewhere, capsys, monkeypatch):
    write_table("rows.csv", THREE, *[f"3,Lamp on.,{ANSWER}"] * 20)
    stdin = io.StringIO("fragge\nfrage\nantwort\n")
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", stdin)
    data = written("--model", "a/b", "--data", "rows.csv")
    assert data["data"]["columns"] == {"prompt": "frage", "completion": "antwort"}
    shown = capsys.readouterr().out
    assert shown.count("which one is the prompt? ") == 2
    # The end of the input is no answer.
    assert main.main(["init", "--model", "a/b", "--data", "rows.csv"]) == 2


FAULTS = {
    (): "--columns prompt=<your column>,completion=<your column>",
    ("--columns", "prompt"): "--columns prompt: not a list of NAME=COLUMN",
    ("--columns", "prompt=fragge,completion=antwort"): "did you mean 'frage'?",
    ("--columns", "promt=frage"): "no dataset format has a column 'promt'",
    (*NAMED, "stages.train.stepz=3"): "unknown key 'stepz'",
    (*NAMED, "stages.train={steps: 3}"): "this block has several lines",
}


@pytest.mark.parametrize(("options", "message"), FAULTS.items())
def test_init_says_what_is_wrong_with_columns(options, message, elsewhere, capsys):
    write_table("rows.csv", THREE, *[f"3,Lamp on.,{ANSWER}"] * 20)
    assert main.main(["init", "--model", "a/b", "--data", "rows.csv", *options]) == 2
    assert message in capsys.readouterr().err
    assert not list(elsewhere.glob("*.yaml"))


OVERRIDES = {
    "model=c/d": "model: c/d  # the model",
    "stages.1.train.steps=5": "- train: {steps: 5, batch_size: 2}  # first",
    "stages.train.adapter.rank=4": "{adapter: {rank: 4}, steps: 1, batch_size: 2}",
    "stages.quantize.method=gptq": "      method: gptq\n      bits: 4 # second",
    "data.train=z": "data: {train: z, max_seq_length: 8}",
    "stages.evaluate.num_tokens=8": "- evaluate: {num_tokens: 8}\n",
    "stages.quantize.calibration.num_tokens=9": "{num_tokens: 9, max_seq_length: 8}",
}


@pytest.mark.parametrize(("override", "shown"), OVERRIDES.items())
def test_overrides_leave_comments_and_layout(override, shown):
    text = TEXT + "  - evaluate:\n"
    changed = recipes.with_override(text, override)
    expected = read(text).data
    merge(expected, [override])
    assert read(changed).data == expected
    assert shown in changed
    assert changed.count("#") == text.count("#")


REFUSED = {
    ("--model", "a/b"): "--data is missing",
    ("--data", "a/b"): "--model is missing",
    ("--model", "a/b", "--data", "c/d", "--task", "draft", "--bits", "4"): "--bits",
    ("--model", "./none", "--data", "c/d"): "no such file or folder: './none'",
    (
        "--model",
        "a/b",
        "--data",
        "./x.jsonl",
    ): "data.train: no such file or folder: './x.jsonl'",
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.items())
def test_init_refuses_what_lmx_train_would_refuse(
    arguments, message, elsewhere, capsys
):
    assert main.main(["init", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(elsewhere.iterdir())


def test_init_refuses_a_drafter(elsewhere, capsys):
    config = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}
    (elsewhere / "drafter").mkdir()
    (elsewhere / "drafter/config.json").write_text(json.dumps(config))
    assert main.main(["init", "--model", "drafter", "--task", "quantize"]) == 2
    assert "drafter: this is a drafter, and no model" in capsys.readouterr().err
    assert not list(elsewhere.glob("*.yaml"))


ROW = '{"prompt": "count to three", "completion": "one two three"}\n'
CODES = {
    "plain": {},
    "affine": {"bits": 4, "group_size": 32},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
    "gguf": {"bits": 4, "group_size": 32},
    "gptq": {"bits": 4, "group_size": 128},
}


@pytest.fixture(scope="module")
def models(make_checkpoint, tmp_path_factory):
    """A function that writes a tiny model with codes of a kind."""
    root = tmp_path_factory.mktemp("kinds")
    base = make_checkpoint(dtype="float16", intermediate_size=128, num_hidden_layers=2)

    def write(kind):
        codes, folder = CODES[kind], root / kind
        if kind == "plain":
            return base
        if kind == "gptq":
            settings = {"quant_method": kind, "sym": True, **codes}
            rng = np.random.default_rng(0)
            packers.write_checkpoint(
                base,
                folder,
                lambda _, outputs, inputs: packers.random_codes(
                    rng, outputs, inputs, bits=4, size=128, symmetric=True
                ),
                lambda layer: packers.gptq(layer, 4),
                settings,
            )
        elif kind == "gguf":
            # The export keeps the codes.
            exporting.export(gguf, write("affine"), folder)
            return next(folder.glob("*.gguf"))
        elif not folder.exists():
            quantized = load_model(base, compute="stored")
            nn.quantize(quantized.model, **codes)
            shutil.copytree(base, folder)
            weights = dict(tree_flatten(quantized.model.parameters()))
            mx.save_safetensors(str(folder / "model.safetensors"), weights)
            config = quantized.config | {"quantization": codes}
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.mark.parametrize("kind", CODES)
def test_what_init_writes_passes_its_dry_run(
    kind, models, elsewhere, capsys, monkeypatch
):
    """Codes are kept: training continues from them, and nothing quantizes twice."""
    monkeypatch.setattr(work, "rates", lambda _: work.Work(1, 1, 1, 1, 1))
    model = str(models(kind))
    (elsewhere / "rows.jsonl").write_text(20 * ROW)
    codes = CODES[kind]
    for task in recipes.TASKS:
        for bits in (None, 2, 4) if task in recipes.BY_BITS else (None,):
            arguments = ["--task", task, "--model", model, "--data", "rows.jsonl"]
            arguments += ["--bits", str(bits)] if bits else []
            file = elsewhere / "r.yaml"
            code = main.main(["init", *arguments, "--output", str(file)])
            error = capsys.readouterr().err
            fits = task == "qat" and bits in (None, codes.get("bits"))
            if codes and task in recipes.BY_BITS and not fits:
                assert (code, file.exists()) == (2, False)
                what = rf"quantized to {codes['bits']} bits already"
                assert re.search(what, error), error
                continue
            assert code == 0, error
            if codes and task == "qat":
                [stage, *_] = read(file.read_text()).data["stages"]
                # With an adapter, the scales of the codes stay.
                assert stage["train"]["qat"] == codes
                assert stage["train"]["adapter"]
            # With these bits, the recipe is the one without.
            if not bits or not codes:
                assert main.train([str(file), "--dry-run"]) == 0, capsys.readouterr()
            capsys.readouterr()
            file.unlink()


def test_init_takes_the_model_of_a_run_directory(elsewhere, capsys):
    base = bundled.bundled_data(Path("data/tiny-base"))
    (elsewhere / "run").mkdir()
    shutil.copytree(base, elsewhere / "run/model")
    assert main.main(["init", "--task", "quantize", "--model", "run"]) == 0
    assert read((elsewhere / "quantize_4bit.yaml").read_text()).data["model"] == (
        "run/model"
    )
