"""The picture of a training has its lines, whatever rows there are."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from toolkit.run.curves import draw_curves

SVG = "{http://www.w3.org/2000/svg}"
LINES = ["training-loss", "validation-loss", "learning-rate"]


def train(step, loss=2.0, rate=1e-3, stage="1-train"):
    numbers = {"step": step, "loss": loss, "learning_rate": rate}
    return {"stage": stage, "kind": "train"} | numbers


def valid(step, loss=2.5, stage="1-train"):
    return {"stage": stage, "kind": "valid", "step": step, "loss": loss}


WHOLE = [valid(0), *(train(step, 3 / step) for step in range(1, 9)), valid(8)]


def drawn(folder, rows, tail=""):
    """Points of every line, and all text; a null has no point."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines + tail)
    target = folder / "stages" / "curves.svg"
    assert draw_curves(folder, "1-train", target)
    root = ElementTree.parse(target).getroot()
    found = {}
    for group in root.iter(f"{SVG}g"):
        if group.get("id") in LINES:
            paths = "".join(path.get("d", "") for path in group.iter(f"{SVG}path"))
            marks = len(list(group.iter(f"{SVG}use")))
            found[group.get("id")] = marks or paths.count("L ")
    return found, {text.text for text in root.iter(f"{SVG}text")}


def test_every_line_has_its_points_and_its_name(tmp_path):
    others = [train(1, stage="2-train"), valid(1, stage="2-train")]
    points, words = drawn(tmp_path, WHOLE + others, tail='{"stage": "1-tr')
    assert points == dict(zip(LINES, [8, 2, 8], strict=True))
    assert {"1-train", "training loss", "validation loss", "step"} <= words


def test_many_points_are_a_line(tmp_path):
    rows = [train(step, 3 + step % 2) for step in range(1, 400)]
    points, _ = drawn(tmp_path, [*rows, valid(0)])
    assert points["training-loss"] > 300


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([valid(0)], [0, 1, 0]),
        ([train(1)], [1, 0, 1]),
        ([valid(0), train(1), train(2, None), train(3)], [2, 1, 3]),
        ([valid(0, None), train(1, None, None)], [0, 0, 0]),
    ],
)
def test_few_rows_and_nulls(tmp_path, rows, expected):
    points, _ = drawn(tmp_path, rows)
    assert [points.get(name, 0) for name in LINES] == expected


def test_no_rows_no_picture(tmp_path):
    assert not draw_curves(tmp_path, "1-train", tmp_path / "curves.svg")
    assert not (tmp_path / "curves.svg").exists()


def test_the_same_rows_are_the_same_bytes(tmp_path):
    drawn(tmp_path, WHOLE)
    first = (tmp_path / "stages" / "curves.svg").read_bytes()
    program = (
        "import sys; from pathlib import Path; from toolkit.run import curves;"
        "folder = Path(sys.argv[1]);"
        "curves.draw_curves(folder, '1-train', folder / 'again.svg');"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"},
        check=True,
        timeout=60,
    )
    assert (tmp_path / "again.svg").read_bytes() == first
    drawn(tmp_path, WHOLE[:-1])
    assert (tmp_path / "stages" / "curves.svg").read_bytes() != first
