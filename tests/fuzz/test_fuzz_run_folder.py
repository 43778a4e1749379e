"""Damaged run directories and caches: the right model or one sentence, never more.

A case copies a run, damages a file or a folder, and gives the same command again.
"""

import json
import os
import random
import shutil
import signal
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
from json_mutations import damage_bytes, dump_json, mutate_json
from lmx.cli import main
from lmx.files.hashes import hash_folder
from lmx.pipeline.quantize.rollback import CandidateModel
from tiny_runs import METRICS_ONLY, SCRATCH_CONFIG, TRAIN, Run

SMALL = SCRATCH_CONFIG | {"hidden_size": 32, "num_hidden_layers": 1}
STEPS = {"steps": 4, "batch_size": 4, "eval_steps": 4, "sample_prompts": ["Add 1."]}
EVALUATE = METRICS_ONLY | {"num_tokens": 50, "latency_tokens": 8}
STAGES = (
    {"train": TRAIN | STEPS},
    {"quantize": {"bits": 4, "group_size": 32}},
    {"evaluate": EVALUATE},
    {"export": {"formats": ["mlx"]}},
)
CALIBRATION = {"dataset": "builtin:stdlib", "num_tokens": 512, "max_seq_length": 64}
GPTQ = {"method": "gptq", "bits": 4, "group_size": 32}
GPTQ |= {"calibration": CALIBRATION | {"num_eval_tokens": 256}}
GPTQ_STAGES = (STAGES[0], {"quantize": GPTQ}, STAGES[3])
SECONDS = 100
LINES = (b"[]\n", b"3\n", b'{"stage": 3}\n', b"\xff\xfe\n", b'{"stage": "1-tr', b"\n\n")


def tiny_run(folder, *stages):
    run = Run(folder, *stages)
    run.model = {"from_scratch": SMALL}
    run.write()
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs by name, each with the bytes of the model that it ends with.

    `quantizing` was interrupted after GPTQ, while its result is compared with RTN. It
    has streams and layers of the blocks, and held-out predictions.
    """
    names = {"finished": STAGES, "interrupted": STAGES}
    names |= {"quantized": GPTQ_STAGES, "quantizing": GPTQ_STAGES}
    made = {
        name: tiny_run(tmp_path_factory.mktemp(name), *stages)
        for name, stages in names.items()
    }
    assert made["finished"]() == made["quantized"]() == 0
    assert made["interrupted"].run_with_signal("SIGINT", "step", 3).returncode == 130
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CandidateModel, "divergence", interrupt)
        assert made["quantizing"]() == 130
    expected = {
        name: (made[end].output / "model/model.safetensors").read_bytes()
        for name, end in {
            "finished": "finished",
            "interrupted": "finished",
            "quantizing": "quantized",
        }.items()
    }
    return {name: (made[name], weights) for name, weights in expected.items()}


def interrupt(*_, **__):
    """As Ctrl-C does."""
    raise KeyboardInterrupt


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    (folder / "inner").mkdir(parents=True)
    for name in ("file", "inner/manifest.json", "inner/model.safetensors"):
        (folder / name).write_text("outside the run directory")
    return folder


@contextmanager
def time_limit(seconds):
    def stop(*_):
        raise AssertionError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def damage(folder: Path, outside: Path, rng: random.Random) -> str:
    """Damage one entry of a folder; returns what was done, in words.

    Entries at the top are damaged as often as all others together.
    """
    entries = sorted(folder.rglob("*") if rng.random() < 0.5 else folder.iterdir())
    path = rng.choice(entries)
    kinds = FOLDER_DAMAGES if path.is_dir() else FILE_DAMAGES
    if path.suffix == ".json":
        kinds = kinds | {f"change values {n}": change_values for n in range(6)}
    kind = rng.choice(sorted(kinds))
    kinds[kind](path, outside, rng)
    return f"{kind}: {path.relative_to(folder)}"


def remove(path, *_):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def change_bytes(path, _, rng):
    path.write_bytes(damage_bytes(rng, path.read_bytes()))


def insert_line(path, _, rng):
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(LINES))
    path.write_bytes(b"".join(lines))


def as_folder(path, _, rng):
    remove(path)
    path.mkdir()
    if rng.random() < 0.5:
        (path / "inner").write_text("a file")


def as_pipe(path, *_):
    remove(path)
    os.mkfifo(path)


def as_link(path, outside, rng):
    remove(path)
    targets = [outside, outside / "file", outside / "none", path.parent, "none"]
    path.symlink_to(rng.choice(targets))


def add_partial(path, outside, rng):
    folder = path if path.is_dir() else path.parent
    target = rng.choice([outside, outside / "file", folder, folder / "none"])
    (folder / ".a.partial").symlink_to(target)


def change_values(path, _, rng):
    content = json.loads(path.read_text())
    for _ in range(rng.randint(1, 3)):
        content = mutate_json(rng, content)
    dump_json(path, content)


BOTH = {f.__name__: f for f in (remove, as_pipe, as_link, add_partial)}
FILE_DAMAGES = BOTH | {
    "change bytes": change_bytes,
    "insert line": insert_line,
    "nest": lambda path, *_: path.write_text("[" * 100_000),
    "as folder": as_folder,
}
FOLDER_DAMAGES = BOTH | {
    "as file": lambda path, *_: (remove(path), path.write_text("a file")),
    "add file": lambda path, *_: (path / "notes.txt").write_text("of the user"),
}


def check_command(command, capsys) -> int:
    """A command is done, or ends with one error; returns its exit code."""
    capsys.readouterr()
    with time_limit(SECONDS):
        code = command()
    error = capsys.readouterr().err
    assert code in (0, 1, 2), code
    assert code == 0 or 0 < len(error) < 5000, error
    return code


def check_commands(run, expected, capsys):
    """Run, report, compare and push: done with the same model, or one error."""
    folder = str(run.output)
    if check_command(lambda: run("--ignore-limits", "--quiet"), capsys) == 0:
        assert (run.output / "model/model.safetensors").read_bytes() == expected
    for arguments in (["report", folder], ["compare", folder]):
        check_command(lambda arguments=arguments: main.main(arguments), capsys)
    # The tests are offline, so that nothing is sent.
    assert check_command(lambda: main.main(["push", folder, "a/b"]), capsys)


@contextmanager
def noted(failures, note):
    """Collect the failure of a case, so that the next cases are made too."""
    try:
        yield
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        failures.append(f"{note}: {error!r} at {place.filename}:{place.lineno}")


@pytest.mark.parametrize("name", ["finished", "interrupted", "quantizing"])
def test_damaged_run_folder(
    runs, tmp_path, outside, name, num_cases, fuzz_random, capsys
):
    original, expected = runs[name]
    before, failures = hash_folder(outside), []
    for _ in range(num_cases(4)):
        seed = fuzz_random.randrange(2**32)
        folder = tmp_path / str(seed)
        folder.mkdir()
        run = tiny_run(folder, *original.stages)
        run.data = original.data
        run.write()
        shutil.copytree(original.output, run.output)
        note = damage(run.output, outside, random.Random(seed))
        with noted(failures, f"{name}, seed {seed}, {note}"):
            check_commands(run, expected, capsys)
            assert hash_folder(outside) == before
        shutil.rmtree(folder)
    assert not failures, "\n".join(failures)


def test_damaged_cache(tmp_path, outside, num_cases, fuzz_random, capsys, monkeypatch):
    """Held-out examples, tokens and hashes."""
    full, failures = tmp_path / "cache", []
    run = tiny_run(tmp_path, {"train": TRAIN | STEPS | {"steps": 1}}, "export")
    del run.data["valid"]
    run.write()
    monkeypatch.setenv("LMX_CACHE", str(full))
    assert run("--quiet") == 0
    expected = (run.output / "model/model.safetensors").read_bytes()
    before = hash_folder(outside)
    for _ in range(num_cases(4)):
        seed = fuzz_random.randrange(2**32)
        shutil.rmtree(run.output, ignore_errors=True)
        copy = tmp_path / f"copy{seed}"
        shutil.copytree(full, copy)
        monkeypatch.setenv("LMX_CACHE", str(copy))
        note = damage(copy, outside, random.Random(seed))
        with noted(failures, f"seed {seed}, {note}"):
            check_command(lambda: run("--ignore-limits", "--quiet"), capsys)
            if (file := run.output / "model/model.safetensors").exists():
                assert file.read_bytes() == expected
            assert hash_folder(outside) == before
        shutil.rmtree(copy)
    assert not failures, "\n".join(failures)
