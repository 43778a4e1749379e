"""curves.svg has all curves of a stage, with gaps, reproducibly."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from lmx.run.html.page import draw_curves

SVG = "{http://www.w3.org/2000/svg}"
LINES = [("loss", "training"), ("loss", "validation"), ("learning_rate", "training")]


def train(step, loss=2.0, rate=1e-3, stage="1-train"):
    metrics = {"step": step, "loss": loss, "learning_rate": rate}
    return {"stage": stage, "kind": "train"} | metrics


def valid(step, loss=2.5, stage="1-train"):
    return {"stage": stage, "kind": "valid", "step": step, "loss": loss}


WHOLE = [valid(0), *(train(step, 3 / step) for step in range(1, 9)), valid(8)]


def drawn(folder, records, tail=""):
    """Points of every line, and all text; a null has no point."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + tail)
    target = folder / "stages" / "curves.svg"
    assert draw_curves(folder, "1-train", target)
    root = ElementTree.parse(target).getroot()
    curves = {}
    for chart in root.iter(f"{SVG}g"):
        _, _, key = chart.get("id", "").partition("1-train-")
        for line in chart.iter(f"{SVG}g") if key else ():
            if (title := line.find(f"{SVG}title")) is not None:
                marks = len(line.findall(f"{SVG}circle"))
                path = line.find(f"{SVG}path").get("d")
                curves[key, title.text] = marks or path.count("L")
    return curves, {text.text for text in root.iter() if text.text}


def test_draw_curves_has_points_and_names(tmp_path):
    others = [train(1, stage="2-train"), valid(1, stage="2-train")]
    points, words = drawn(tmp_path, WHOLE + others, tail='{"stage": "1-tr')
    assert points == dict(zip(LINES, [8, 2, 8], strict=True))
    assert {"1-train", "Loss", "training", "validation", "step"} <= words


def test_draw_curves_downsamples_many_points(tmp_path):
    records = [train(step, 3 + step % 2) for step in range(1, 400)]
    points, _ = drawn(tmp_path, [*records, valid(0)])
    # Two records per point, the most that a chart can show.
    assert points["loss", "training"] == 199


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([valid(0)], [0, 1, 0]),
        ([train(1)], [1, 0, 1]),
        ([valid(0), train(1), train(2, None), train(3)], [2, 1, 3]),
    ],
)
def test_draw_curves_leaves_gaps_for_null(tmp_path, records, expected):
    points, _ = drawn(tmp_path, records)
    assert [points.get(name, 0) for name in LINES] == expected


@pytest.mark.parametrize("records", [[], [valid(0, None), train(1, None, None)]])
def test_draw_curves_without_records_writes_nothing(tmp_path, records):
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert not draw_curves(tmp_path, "1-train", tmp_path / "curves.svg")
    assert not (tmp_path / "curves.svg").exists()


def test_draw_curves_is_reproducible(tmp_path):
    drawn(tmp_path, WHOLE)
    first = (tmp_path / "stages" / "curves.svg").read_bytes()
    program = (
        "import sys; from pathlib import Path; from lmx.run.html import page;"
        "folder = Path(sys.argv[1]);"
        "page.draw_curves(folder, '1-train', folder / 'again.svg')"
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
