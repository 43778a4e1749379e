"""report.html: complete, escaped, self-contained, accessible and reproducible."""

import json
import re
from itertools import pairwise

import pytest
from lmx.errors import UserError
from lmx.run.html.charts import Scale, line_chart
from lmx.run.html.page import layer_maps, page, write_page
from sample_runs import MANIFEST, RECORDS, REPORT, RESOLVED, SHIFT, Page, make_run

SECTIONS = [
    *("thresholds", "models", "gap_recovered", "curves", "layers", "speculation"),
    *("samples", "commands", "recipe", "versions"),
]


def page_of(folder):
    return Page(page(folder))


@pytest.fixture(scope="module")
def full_page(tmp_path_factory):
    return page_of(make_run(tmp_path_factory.mktemp("pages") / "try"))


def test_page_is_whole_and_self_contained(full_page):
    """Every section and tag; no script, no address of another file, and a policy that
    would forbid both."""
    ids = [a["id"] for _, a in full_page.tags if "id" in a]
    assert len(set(ids)) == len(ids)
    assert [name for name in SECTIONS if name in ids] == SECTIONS
    links = {a["href"].removeprefix("#") for a in full_page.all("a")}
    assert links == {*SECTIONS, "main"}
    assert full_page.faults == []
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in full_page.tags}
    html = full_page.html
    assert not re.search(r"https?:|url\(|@import|\ssrc=|\son\w+=", html)
    policy = [a["content"] for a in full_page.all("meta") if "http-equiv" in a]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_page_has_no_control_characters(tmp_path):
    """Shown by `cat`, they would control a terminal; a browser shows a blank."""
    folder = make_run(tmp_path / "try")
    controls = "".join(map(chr, [*range(9), *range(11, 32), *range(127, 160), 0x202E]))
    record = {"stage": "1-train", "step": 1, "prompt": f"a{controls}b", "expected": "c"}
    record |= {"answer": f"\x1b]0;title\x07\x1b[31m{SHIFT}"}
    with (folder / "samples.jsonl").open("a") as stream:
        stream.write(f"\n{json.dumps(record)}\n")
    html = page(folder)
    assert not set(controls) & set(html)
    assert r"a\u0000\u0001" in html
    assert r"\u001b]0;title\u0007\u001b[31m&lt;script&gt;" in html
    assert page_of(folder).faults == []


def test_page_escapes_user_text(full_page):
    assert SHIFT not in full_page.html
    for tag in ("dd", "td", "pre"):
        assert SHIFT in full_page.text[tag]


def test_page_shows_the_values_of_the_run(full_page):
    cells = full_page.text["td"]
    for text in (
        "0.8000 ±\u00a00.0500",
        "90.0% ±\u00a01.2%",
        "99.9%",
        "3.300 ±\u00a00.100",
        "0.0200 ±\u00a00.0010",
        "12.5",
        "not measured",
        "7 of 100",
        "12,345",
        "2 min",
    ):
        assert text in cells
    assert "arc: acc,none" in full_page.text["th"]
    assert "0.500 ±\u00a00.010" in cells
    assert "missed" in cells
    assert "0.41" in cells
    assert "4/64" in cells
    assert "cd" * 32 in cells
    assert "lmx generate exports/try/model" in full_page.text["pre"]
    assert "lmx-train try.yaml seed=1 --restart" in full_page.text["pre"]
    assert RESOLVED in full_page.text["pre"]


def test_page_is_accessible(full_page):
    """Tables have captions and headings; charts have titles, descriptions and focus;
    scroll regions have labels and focus; headings skip no level."""
    tables = re.findall(r"<table.*?</table>", full_page.html, re.DOTALL)
    assert len(tables) > 10
    for table in tables:
        assert "<caption>" in table
        for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL):
            assert '<th scope="' in row
        assert table.count("<th ") == table.count('<th scope="')
    pictures = [a for a in full_page.all("svg") if "aria-hidden" not in a]
    texts = dict(re.findall(r'id="([^"]+)">([^<]*)</(?:title|desc)>', full_page.html))
    # Loss, learning rate, speed, memory. No norms.
    assert len(pictures) == 4
    for picture in pictures:
        assert (picture["role"], picture["tabindex"]) == ("img", "0")
        assert all(texts[name] for name in picture["aria-labelledby"].split())
    words = texts["1-train-loss-words"]
    assert "training: 2 at step 1, 1 at step 2; lowest 1 at step 2, highest 2" in words
    assert "validation: 3 at step 0" in words
    regions = [a for a in full_page.all("div") if a.get("class") == "scroll"]
    assert len(regions) > 5
    for region in regions:
        assert (region["role"], region["tabindex"]) == ("region", "0")
        assert region["aria-label"]
    levels = [int(tag[1]) for tag, _ in full_page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_page_of_a_run_that_just_started(tmp_path, status):
    manifest = MANIFEST | {"status": status, "ended": None, "stages": {}}
    folder = make_run(tmp_path / "try", report=None, manifest=manifest, records=None)
    (folder / "model").rmdir()
    page = page_of(folder)
    assert status in page.text["td"]
    assert ("the last word" in page.text["pre"]) == (status != "running")
    assert "lmx generate" not in page.text["pre"]
    refreshes = [a for a in page.all("meta") if a.get("http-equiv") == "refresh"]
    assert [a["content"] for a in refreshes] == ["10"] * (status == "running")
    assert {"models", "curves", "thresholds"}.isdisjoint(
        a.get("id") for _, a in page.tags
    )


def without(values, path=()):
    """Copies of nested dicts, each without one of the keys, with the key's path."""
    for key in values:
        yield (*path, key), {k: v for k, v in values.items() if k != key}
        if isinstance(values[key], dict):
            for below, values_left in without(values[key], (*path, key)):
                yield below, values | {key: values_left}


def test_page_with_any_value_missing(tmp_path):
    """Other versions write other values, and stages may omit some."""
    folder = make_run(tmp_path / "try")
    cases = [*without(REPORT)]
    assert len(cases) > 40
    for _, report in cases:
        (folder / "report.json").write_text(json.dumps(report))
        assert page_of(folder).faults == []


def test_page_with_few_values(tmp_path):
    records = [row | {"loss": None, "tokens_per_second": 0.0} for row in RECORDS[1:]]
    page = page_of(make_run(tmp_path / "try", records=records))
    ids = {a["id"] for _, a in page.tags if "id" in a}
    assert "1-train-tokens_per_second-title" in ids
    assert "1-train-loss-title" not in ids


def test_page_is_reproducible_and_needs_a_run(tmp_path):
    folder = make_run(tmp_path / "try")
    assert write_page(folder).read_bytes() == write_page(folder).read_bytes()
    tmp_path = folder / "model"
    with pytest.raises(UserError, match="not a run directory"):
        write_page(tmp_path)
    assert not list(tmp_path.iterdir())


def test_long_curves_are_downsampled(tmp_path):
    records = [RECORDS[1] | {"step": n, "loss": 2 + n % 2} for n in range(1, 5001)]
    html = page(make_run(tmp_path / "try", records=records))
    assert len(html) < 100_000
    # Neighbors are averaged: a zigzag of 2 and 3 is about 2.5 throughout.
    [line] = re.findall(r'class="line line-1" d="(M[^"]{999,})"/>', html)[:1]
    heights = [float(y) for y in re.findall(r" ([\d.]+)(?=L|$| L)", line)]
    assert 200 < len(heights) <= 240
    assert max(heights) - min(heights) < 20


def test_curve_has_gaps_for_null():
    points = [(0, 2.0), (1, None), (2, 4.0), (3, 2.0)]
    chart = line_chart("key", "Loss", "nats", {"training": points, "none": [(0, None)]})
    [(name, path, marks)] = chart.paths
    assert (name, len(marks)) == ("training", 3)
    assert path == "M50.0 172.0 M243.3 10.0 L340.0 172.0"
    assert line_chart("key", "Loss", "nats", {"none": [(0, None)]}) is None


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-3, 7), (0.59, 0.6), (1e-6, 2e-3), (5, 123456)]
)
def test_scale_ticks_are_round_and_in_range(low, high):
    scale = Scale(low, high, 0, 100)
    places = [place for place, _ in scale.ticks]
    assert 2 <= len(places) <= 6
    assert places == sorted(places)
    assert 0 <= places[0] <= places[-1] <= 100
    for place, label in scale.ticks:
        value = float(label.replace(",", ""))
        assert scale(value) == pytest.approx(place, abs=0.6)


def test_scale_of_a_single_value():
    for value in (0.0, 5.0, -2.0):
        assert Scale.of([value], 0, 100, zero=False)(value) == 50


def test_layer_map_has_a_cell_for_every_layer():
    bits, error = layer_maps(REPORT["models"])["quantized"]
    assert bits.kinds == ["mlp.up_proj", "router"]
    first, second = (cells for _, cells in bits.blocks)
    assert (first[0].text, first[1]) == ("4/64", None)
    assert (second[0].text, second[1].text) == ("2/64", "4/64")
    assert second[0].shade < first[0].shade
    assert [cell.text for cell in bits.outside] == ["16"]
    first, second = (cells for _, cells in error.blocks)
    assert (first[0].text, second[0].text, second[1].text) == ("0.8", "11", "-")
    assert first[0].shade < second[0].shade
