"""The run directory: one owner, one recipe, stages complete only if unchanged."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from lmx.errors import UserError
from lmx.files.artifacts import ArtifactStore
from lmx.run.run_dir import RunDir

HOLD = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from lmx.run.run_dir import RunDir
recipe = SimpleNamespace(name="try", text="seed: 1", resolved="seed: 1")
with RunDir.open(
    *(Path(sys.argv[1]), recipe, {"1-train": "one"}, dict),
    recipe_hash="one",
    command="again",
) as run:
    run.start_stage("1-train", {"models": {}, "files": {}})
    (run.path / "metrics.jsonl").write_text(
        '{"stage": "1-train", "kind": "train", "step": 20, "peak_memory_gb": 1.5}\\n'
        '{"stage": "1-train", "kind": "train", "step": 30, "loss": 2.0}\\n'
        '{"stage": "1-train", "kind": "train", "step": 40, "peak_mem'
    )
    print("held", flush=True)
    sys.stdin.read()
    run.set_status("done")
"""


STAGES = ("1-train", "2-validate", "3-export")


def result(loss=2.5):
    """The result of a stage."""
    folders = dict.fromkeys(("model", "reference", "adapters", "draft", "rounded"))
    return folders | {"facts": {"loss": loss}, "published": []}


def no_inputs(stage):
    return {"models": {}, "files": {}}


def start(
    path,
    recipe_hash="one",
    *,
    plan=None,
    inputs=no_inputs,
    restart=False,
    resolved="seed: 1",
):
    plan = plan or {stage: f"{recipe_hash} {stage}" for stage in STAGES}
    schema = "# yaml-language-server: $schema=/a/private/path\n"
    recipe = SimpleNamespace(
        name="try", text=f"{schema}seed: 1 # text", resolved=resolved
    )
    options = {"recipe_hash": recipe_hash, "command": "again", "restart": restart}
    return RunDir.open(path, recipe, plan, inputs, **options)


def manifest(path):
    return json.loads((path / "manifest.json").read_text())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "exports" / "try"


@pytest.fixture
def holder(path):
    """Another process that works in the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.communicate()


def test_open_creates_a_run(path):
    with start(path) as run:
        assert manifest(path)["status"] == "running"
        assert run.crash_note is None
        run.set_status("done")
    facts = manifest(path)
    assert (facts["status"], facts["recipe_hash"]) == ("done", "one")
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["versions"]["mlx"]
    assert facts["machine"]["cores"] == os.cpu_count()
    assert facts["started"] <= facts["ended"]
    assert (path / "recipe.yaml").read_text() == "seed: 1 # text"
    assert (path / "resolved.yaml").read_text() == "seed: 1"


def test_open_refuses_a_second_process(path, holder):
    with pytest.raises(UserError, match=f"process {holder.pid}") as caught:
        start(path)
    assert caught.value.code == 2
    with pytest.raises(UserError, match=f"process {holder.pid}"):
        start(path, restart=True)
    holder.communicate()
    with start(path) as run:
        assert run.crash_note is None


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_network_disk_without_locks_is_named(path, monkeypatch, number):
    def refuse(handle, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match="does not support file locks") as caught:
        start(path)
    assert caught.value.hint == "use another folder with output=..."
    store = ArtifactStore(path / "cache", other_folder="set LMX_CACHE")
    with pytest.raises(UserError, match="does not support file locks") as caught:
        store.get_or_make("kind", "key", lambda folder: None)
    assert caught.value.hint == "set LMX_CACHE"


@pytest.fixture
def before_the_lock(monkeypatch):
    """Call a function before the next locks are taken."""
    real = fcntl.flock

    def install(*calls):
        waiting = iter(calls)

        def flock(handle, operation):
            next(waiting, lambda: None)()
            real(handle, operation)

        monkeypatch.setattr(fcntl, "flock", flock)

    return install


def test_a_folder_that_is_moved_before_its_lock_is_not_used(path, before_the_lock):
    start(path).__exit__(None)
    moved = path.with_name("moved")
    before_the_lock(lambda: os.rename(path, moved))
    before = (path / "manifest.json").read_bytes()
    with start(path, "two"):
        assert (moved / "manifest.json").read_bytes() == before
        assert manifest(path)["recipe_hash"] == "two"
        # The lock is that of the path, and the moved folder is free.
        with pytest.raises(UserError, match="another process uses this folder"):
            start(path, "two")
        start(moved).__exit__(None)


def test_a_folder_that_is_replaced_before_its_lock_is_checked_again(
    path, before_the_lock
):
    other = path.with_name("other")
    with start(other, "two") as run:
        leave(run, "1-train")
    start(path).__exit__(None)

    def replace():
        os.rename(path, path.with_name("moved"))
        os.rename(other, path)

    before_the_lock(replace)
    with pytest.raises(UserError, match="the run of another recipe"):
        start(path)
    assert manifest(path)["recipe_hash"] == "two"


def test_a_folder_that_always_moves_is_an_error(path, before_the_lock):
    names = (path.with_name(f"moved-{n}") for n in range(1000))
    before_the_lock(*[lambda: os.rename(path, next(names))] * 1000)
    with pytest.raises(UserError, match="other programs move or delete this folder"):
        start(path)


def test_restart_of_a_run_that_another_process_moved_moves_nothing(
    path, before_the_lock
):
    start(path).__exit__(None)
    before_the_lock(lambda: os.rename(path, path.with_name("moved")))
    start(path, restart=True).__exit__(None)
    names = sorted(folder.name for folder in path.parent.iterdir())
    assert names == ["moved", "try"]


def test_crash_note_after_a_killed_run(path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with start(path) as run:
        assert run.crash_note == (
            "the previous run crashed or was killed in stage 1-train, "
            "after step 20, peak memory 1.50 GB"
        )


def test_exceptions_set_the_status(path):
    with pytest.raises(ZeroDivisionError), start(path):
        _ = 1 / 0
    assert manifest(path)["status"] == "failed"
    with start(path) as run:
        assert run.crash_note is None
        run._record_end(KeyboardInterrupt)
    assert manifest(path)["status"] == "interrupted"


def test_open_refuses_a_changed_recipe_with_its_diff(path):
    with start(path) as run:
        leave(run, "1-train")
    with pytest.raises(UserError, match="seed: 1 -> 2") as caught:
        start(path, "two", resolved="seed: 2")
    assert caught.value.code == 2
    assert "--restart" in caught.value.hint
    assert "try.old-1" in caught.value.hint
    # The refusal holds no lock and changes nothing.
    assert (path / "resolved.yaml").read_text() == "seed: 1"
    start(path).__exit__(None)


def test_restart_moves_the_old_run_aside(path):
    start(path, restart=True).__exit__(None)
    assert [p.name for p in path.parent.iterdir()] == ["try"]
    with start(path) as run:
        run.complete_stage("1-train", result(), [])
    for number, recipe_hash in enumerate(["two", "three"], 1):
        with start(path, recipe_hash, restart=True) as run:
            assert run.completed_stage("1-train", pytest.fail) is None
            aside = path.with_name(f"try.old-{number}")
            assert manifest(aside)["recipe_hash"] == ["one", "two"][number - 1]
    assert "1-train" in manifest(path.with_name("try.old-1"))["stages"]


@pytest.mark.parametrize("restart", [False, True])
def test_open_refuses_a_folder_with_other_files(path, restart):
    path.mkdir(parents=True)
    (path / "manifest.json").write_text('{"name": "an app"}')
    with pytest.raises(UserError, match=r"not a run directory .* manifest\.json"):
        start(path, restart=restart)
    assert [p.name for p in path.iterdir()] == ["manifest.json"]
    # Hidden files are no obstacle.
    (path / "manifest.json").rename(path / ".DS_Store")
    start(path, restart=restart).__exit__(None)


def test_open_reports_an_invalid_output_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file exists in place") as caught:
        start(tmp_path / "file")
    assert caught.value.code == 1
    with pytest.raises(UserError, match="is a file, not a folder"):
        start(tmp_path / "file" / "try")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_open_reports_a_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="no write permission"):
        start(tmp_path / "try")


def leave(run, stage, text="content"):
    folder = run.stage_folder(stage)
    (folder / "weights").write_text(text)
    run.complete_stage(stage, result(), [folder])
    return folder / "weights"


def test_complete_stages_are_kept_until_they_are_discarded(path):
    with start(path) as run:
        leave(run, "1-train")
        assert run.completed_stage("2-validate", pytest.fail) is None
        leave(run, "2-validate")
        leftover = run.stage_folder("3-export") / ".0000100.abc.partial"
        leftover.mkdir()
    with start(path) as run:
        assert not leftover.exists()
        assert run.completed_stage("1-train", pytest.fail) == result()
        assert run.completed_stage("2-validate", pytest.fail) == result()
        run.discard_stages(["2-validate", "3-export"])
        assert not (run.path / "stages/2-validate").exists()
    with start(path) as run:
        assert run.completed_stage("1-train", pytest.fail)
        assert run.completed_stage("2-validate", pytest.fail) is None
        empty = [run.stage_folder("2-validate")]
        with pytest.raises(AssertionError, match="empty"):
            run.complete_stage("2-validate", result(), empty)


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_completed_stage_warns_about_damaged_artifacts(path, damage):
    with start(path) as run:
        weights = leave(run, "1-train")
        weights.write_text("whale") if damage == "change" else weights.unlink()
        warnings = []
        assert run.completed_stage("1-train", warnings.append) is None
        assert "stages/1-train is damaged or missing" in warnings[0]
