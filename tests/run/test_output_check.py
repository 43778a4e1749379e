"""`--dry-run` refuses the outputs that a run would refuse.

The tests may run as root, who may write everywhere. So a foreign owner and a read-only
disk are errors of a replaced `mkdir`.
"""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from lmx.cli import main
from lmx.errors import UserError
from lmx.pipeline import work
from lmx.run import run_dir
from lmx.run.run_dir import check_output

RECIPE = """model: {from_scratch: {hidden_size: 64, intermediate_size: 96, \
num_hidden_layers: 1, vocab_size: 320}}
data: {train: rows.txt}
stages:
  - train: {steps: 1, batch_size: 1}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "rows.txt").write_text("one line\nand another\n" * 40)
    # A dry run measures this machine.
    monkeypatch.setattr(work, "rates", lambda _: work.Work(1, 1, 1, 1, 1))
    return tmp_path


def contents(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("a\0b", "a NUL character"),
        ("x" * 5000, "has over 255 bytes"),
        ("x/" * 2500, "has more than 3,500 bytes"),
        ("~no-such-user/run", "there is no user no-such-user"),
        ("rows.txt", "is a file"),
        ("rows.txt/run/deep", "is a file"),
        ("dangling", "is a link that leads nowhere"),
        ("dangling/run", "is a link that leads nowhere"),
        ("loop", "is a link that leads nowhere"),
        ("/proc/run", "cannot write"),
        ("/proc/self/fd/run", "cannot write"),
        ("/dev/null", "is a file"),
        ("other", "not a run directory of lmx: it has notes.txt"),
        (".", "not a run directory of lmx: it has"),
    ],
)
def test_odd_output_is_refused(folder, output, message, capsys):
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "other").mkdir()
    (folder / "other/notes.txt").write_text("mine")
    argument = [f"output={output}"]
    # No argument of a program has a NUL character.
    if output in ("a\0b", "dangling", "other"):
        text = output.replace("\0", "\\0")
        (folder / "recipe.yaml").write_text(f'{RECIPE}output: "{text}"\n')
        argument = []
    before = contents(folder)
    assert main.train(["recipe.yaml", "--dry-run", *argument]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert max(map(len, error.splitlines())) < 1_000
    assert contents(folder) == before
    # A run has the same exit code.
    for flags in ([], ["--restart"]):
        arguments = ["recipe.yaml", "--ignore-limits", *flags, *argument]
        assert main.train(arguments) == 2
        assert "Traceback" not in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize("output", ["new", "new/deep/run", "empty", "link", "exports"])
def test_good_output_passes_and_is_not_created(folder, output):
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("empty")
    before = contents(folder)
    assert main.train(["recipe.yaml", "--dry-run", f"output={output}"]) == 0
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EACCES, "no write permission"),
        (errno.EPERM, "no write permission"),
        (errno.EROFS, "the disk is read-only"),
        (errno.ENOSPC, "no space left on the disk"),
        (errno.EDQUOT, "the disk quota is exceeded"),
    ],
)
def test_disk_errors_are_exit_code_2(tmp_path, monkeypatch, number, reason):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_dir.tempfile, "mkdtemp", refuse)
    with pytest.raises(UserError, match=reason) as caught:
        check_output(tmp_path / "run")
    assert caught.value.code == 2


@pytest.mark.parametrize("flags", [[], ["--restart"]])
def test_a_read_only_output_is_exit_code_2_of_a_run(folder, monkeypatch, capsys, flags):
    real = os.open

    def refuse(path, flags, *more, **other):
        if Path(path).absolute().is_relative_to(folder / "run"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *more, **other)

    monkeypatch.setattr(run_dir.os, "open", refuse)
    assert main.train(["recipe.yaml", "output=run", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("run: cannot write: the disk is read-only")


def test_folder_of_another_process_is_refused(tmp_path):
    with (tmp_path / run_dir.LOCK).open("w") as lock:
        check_output(tmp_path)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process uses this folder"):
            check_output(tmp_path)
