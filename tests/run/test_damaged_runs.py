"""A damaged run directory gives one clear error, and nothing outside it changes."""

import json
import os

import pytest
from lmx.cli import main
from lmx.errors import UserError
from lmx.run.html.page import write_page
from lmx.run.logger import read_metrics
from page_data import charts, rows
from sample_runs import MANIFEST, RECORDS, REPORT, make_run
from test_run_dir import leave, manifest, result, start

WITHOUT_ARTIFACTS = {"1-train": {"result": result(), "sha256": ""}}
OUTSIDE = {"artifacts": {"../../secret": {"a": "0"}}, "sha256": ""}
MODEL_OUTSIDE = {"artifacts": {}, "sha256": "", "result": {**result(), "model": "/etc"}}
MANIFESTS = {
    "truncated": '{"recipe_hash": "o',
    "binary": b"\x80\xff\x00",
    "nested": "[" * 100_000,
    "integer": '{"recipe_hash": "one", "name": ' + "9" * 5000 + "}",
    "keys": '{"recipe_hash": "one"}',
    "stages": json.dumps(MANIFEST | {"stages": []}),
    "stage": json.dumps(MANIFEST | {"current_stage": "../../etc"}),
    "record": json.dumps(MANIFEST | {"stages": WITHOUT_ARTIFACTS}),
    "outside": json.dumps(
        MANIFEST | {"stages": {"1-train": OUTSIDE | {"result": result()}}}
    ),
    "model": json.dumps(MANIFEST | {"stages": {"1-train": MODEL_OUTSIDE}}),
    "time": json.dumps(MANIFEST | {"started": "yesterday"}),
}


@pytest.mark.parametrize("damage", MANIFESTS)
def test_damaged_manifest_is_one_error_for_all_commands(tmp_path, capsys, damage):
    folder, content = make_run(tmp_path / "try"), MANIFESTS[damage]
    content = content if isinstance(content, bytes) else content.encode()
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(UserError, match="this manifest is damaged") as caught:
        start(folder)
    assert len(str(caught.value)) < 1000
    for command in ("report", "compare"):
        assert main.main([command, str(folder)]) == 2
        assert "this manifest is damaged" in capsys.readouterr().err
    # --restart sets the folder aside.
    start(folder, restart=True).__exit__(None)
    assert (tmp_path / "try.old-1/manifest.json").read_bytes() == content


@pytest.mark.parametrize("content", ["[]", "3", "null", '"recipe_hash"'])
def test_manifest_of_another_program_is_no_run(tmp_path, content):
    folder = make_run(tmp_path / "try")
    (folder / "manifest.json").write_text(content)
    with pytest.raises(UserError, match="not a run directory"):
        start(folder)
    with pytest.raises(UserError, match="not a run directory"):
        write_page(folder)


def test_changed_record_makes_its_stage_run_again(tmp_path):
    with start(tmp_path / "try") as run:
        leave(run, "1-train")
    content = manifest(run.path)
    content["stages"]["1-train"]["result"]["facts"]["loss"] = 0.1
    (run.path / "manifest.json").write_text(json.dumps(content))
    warnings = []
    with start(run.path) as run:
        assert run.completed_stage("1-train", warnings.append) is None
    assert warnings == ["the record of stage 1-train is damaged: it runs again"]


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner/file").write_text("mine")
    (folder / "file").write_text("mine")
    yield folder
    assert (folder / "inner/file").read_text() == "mine"
    assert (folder / "file").read_text() == "mine"
    assert sorted(p.name for p in folder.rglob("*")) == ["file", "file", "inner"]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("log.txt", "file"),
        ("stages", "inner"),
        ("stages/1-train", "missing"),
        ("model", "inner"),
        (".a.partial", "file"),
    ],
)
def test_links_out_of_a_run_are_refused(tmp_path, outside, name, target):
    with start(tmp_path / "try"):
        pass
    link = tmp_path / "try" / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(outside / target)
    with pytest.raises(UserError, match="leaves the run directory") as caught:
        start(tmp_path / "try")
    assert caught.value.place == str(link)
    assert link.is_symlink()


def test_lock_that_is_no_file_is_one_error(tmp_path, outside):
    (tmp_path / "try").mkdir()
    lock = tmp_path / "try/.lock"
    lock.symlink_to(outside / "file")
    with pytest.raises(UserError, match="a link exists in place of the file"):
        start(lock.parent)
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(UserError, match="this is a named pipe"):
        start(lock.parent)


def test_partial_links_within_a_run_are_removed_but_not_followed(tmp_path):
    with start(tmp_path / "try") as run:
        weights = leave(run, "1-train")
    for name, target in {
        ".a.partial": "stages",
        ".b.partial": "stages/1-train",
    }.items():
        (run.path / name).symlink_to(target)
    with start(run.path):
        assert weights.exists()
        assert not list(run.path.glob("*.partial"))


def test_pipes_do_not_block(tmp_path):
    folder = make_run(tmp_path / "try")
    for name in ("metrics.jsonl", "report.json", "log.txt", "manifest.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(UserError, match="neither a file nor a folder"):
            start(folder)
        if name != "manifest.json":
            write_page(folder)
    with pytest.raises(UserError, match="version of lmx: this is a named pipe"):
        write_page(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".lock", "a folder exists in place of the file"),
        ("manifest.json", "this manifest is damaged"),
        ("recipe.yaml", "a folder exists in place of the file"),
    ],
)
def test_folders_in_place_of_files_are_one_error(tmp_path, name, words):
    with start(tmp_path / "try") as run:
        pass
    (run.path / name).unlink()
    (run.path / name / "inner").mkdir(parents=True)
    with pytest.raises(UserError, match=words):
        start(run.path)


LINES = [
    *('{"stage": 3}', "[]", "3", '{"kind": "train"}', "\x85", "[" * 50_000),
    '{"stage": "1-train", "kind": "train", "step": "1", "loss": 2.0}',
    '{"stage": "1-train", "kind": "train", "step": 3, "loss": "low"}',
    '{"stage": "1-train", "kind": "train", "step": 4, "loss": 1e400}',
    '{"stage": "1-train", "kind": "train", "step": 5, "loss": NaN}',
    f'{{"stage": "1-train", "kind": "train", "step": {"9" * 60}, "loss": 2}}',
]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_lines_that_are_no_records_are_skipped(tmp_path, name):
    folder = make_run(tmp_path / "try")
    before = (folder / name).read_bytes()
    text = "\n".join(LINES).encode()
    (folder / name).write_bytes(b"\xff\xfe\n" + text + b"\n" + before)
    page = write_page(folder).read_text()
    assert "Loss" in [chart["title"] for chart in charts(page)]
    assert main.main(["compare", str(folder), "--html", str(tmp_path / "x.html")]) == 0
    assert read_metrics(folder, "1-train")[-len(RECORDS) :] == RECORDS


def test_texts_keep_their_own_line_breaks(tmp_path):
    """U+2028 and U+0085 end a line for str.splitlines, but not in JSON Lines."""
    folder = make_run(tmp_path / "try")
    record = {"stage": "1-train", "step": 1, "prompt": "a\u2028b\x85c", "answer": "d"}
    text = json.dumps(record, ensure_ascii=False)
    (folder / "samples.jsonl").write_text(text + "\n")
    page = write_page(folder).read_text()
    assert ["1", "a\u2028b\\u0085c", "d"] in rows(page)


REPORTS = [
    *({"models": {"base": 3}}, {"models": {"base": {"perplexity": "low"}}}),
    *({"thresholds": [{"name": "kl"}]}, {"thresholds": 3}, {"samples": ["a"]}),
    *({"training": []}, {"training": {"steps": "3"}}, {"speculation": {"a": 3}}),
    {"models": {"base": {"layers": {"a.0.b": {"error": "high"}}}}},
    {"models": {"base": {"bytes": 10**400}}},
]


@pytest.mark.parametrize("damage", REPORTS)
def test_report_of_other_types_is_one_error(tmp_path, capsys, damage):
    folder = make_run(tmp_path / "try", report=REPORT | damage)
    for command in ("report", "compare"):
        assert main.main([command, str(folder)]) == 2
        assert "report.json: not a report of lmx: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "3", "{a: b", "a: &a [*a]", "\x00", "[" * 9999),
        "{model: {path: a}, stages: 3}",
    ],
)
def test_damaged_resolved_recipe_is_one_error(tmp_path, text):
    folder = make_run(tmp_path / "try")
    (folder / "resolved.yaml").write_text(text)
    with pytest.raises(UserError, match="not the recipe of a run"):
        write_page(folder)
