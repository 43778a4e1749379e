"""report.html: complete, escaped, self-contained, accessible and reproducible."""

import base64
import hashlib
import json
import re
from html import unescape

import pytest
from lmx.errors import UserError
from lmx.run.html.blocks import line_chart, render
from lmx.run.html.layer_maps import layer_maps
from lmx.run.html.page import page, write_page
from page_data import blocks, charts, data_of, drawn, needs_node, rows, sections
from sample_runs import HOSTILE, MANIFEST, RECORDS, REPORT, RESOLVED, Page, make_run

SECTIONS = [
    *("thresholds", "models", "gap_recovered", "curves_of_1-train", "layers"),
    *("speculative_decoding", "samples", "commands", "recipe", "versions_and_hashes"),
]


@pytest.fixture(scope="module")
def full_page(tmp_path_factory):
    return page(make_run(tmp_path_factory.mktemp("pages") / "try"))


@pytest.fixture(scope="module")
def full_dom(full_page, tmp_path_factory):
    return drawn(full_page, tmp_path_factory.mktemp("drawn"))


def test_page_is_whole_and_self_contained(full_page):
    """No address of another file, and a policy that lets only this script run."""
    assert [*sections(full_page)] == SECTIONS
    parsed = Page(full_page)
    assert parsed.faults == []
    assert not {"link", "img", "iframe"} & {tag for tag, _ in parsed.tags}
    html = re.sub(r"http://www\.w3\.org/(2000/svg|1999/xhtml)", "", full_page)
    assert not re.search(r"https?:|url\(|@import", html)
    names = {name for _, attributes in parsed.tags for name in attributes}
    assert not [name for name in names if name == "src" or name.startswith("on")]
    script = re.findall(r"<script>(.*?)</script>", full_page, re.DOTALL)[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [a["content"] for a in parsed.all("meta") if "http-equiv" in a]
    allowed = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert policy == f"default-src 'none'; {allowed}"
    assert script.count("\n") <= 80


def hostile_page(folder):
    """A page with markup in place of every text that lmx does not write itself."""
    models = {HOSTILE: {**REPORT["models"]["quantized"], "custom": {HOSTILE: 1.0}}}
    models[HOSTILE]["layers"] = {f"a.0.{HOSTILE}": {"bits": 4}, HOSTILE: {"bits": 4}}
    report = REPORT | {
        "models": models,
        "samples": [{"prompt": HOSTILE, "expected": HOSTILE, "answers": {HOSTILE: ""}}],
        "speculation": {HOSTILE: {HOSTILE: {}}},
        "thresholds": [{"name": HOSTILE, "value": 1, "limit": 1, "passed": True}],
    }
    manifest = MANIFEST | {"name": HOSTILE, "command": HOSTILE, "status": "failed"}
    records = [record | {"stage": HOSTILE} for record in RECORDS]
    run = make_run(folder, report=report, manifest=manifest, records=records)
    (run / "log.txt").write_text(HOSTILE)
    return page(run)


def test_page_escapes_what_it_shows(tmp_path):
    html = hostile_page(tmp_path / "try")
    parsed = Page(html)
    assert parsed.faults == []
    assert len(parsed.all("script")) == 2
    assert not parsed.all("img")
    assert json.dumps(data_of(html)).count(json.dumps(HOSTILE)[1:-1]) > 15
    # Without the escapes of the data, or of the text, there would be an image.
    assert Page(html.replace(r"\u003c", "<")).all("img")
    assert Page(unescape(html.partition("</title>")[2])).all("img")


@needs_node
def test_script_draws_everything_as_text(tmp_path):
    dom = drawn(hostile_page(tmp_path / "try"), tmp_path).partition("</noscript>")[2]
    tags = {tag for tag, _ in Page(dom).tags}
    assert {"header", "section", "table", "svg", "pre", "details"} < tags
    assert "img" not in tags
    assert dom.count("&lt;/script>&lt;img") > 15


def test_page_has_no_control_characters(tmp_path):
    """Shown by `cat`, they would control a terminal; a browser shows a blank."""
    folder = make_run(tmp_path / "try")
    controls = "".join(map(chr, [*range(9), *range(11, 32), *range(127, 160), 0x202E]))
    record = {"stage": "1-train", "step": 1, "prompt": f"a{controls}b"}
    with (folder / "samples.jsonl").open("a") as stream:
        stream.write(f"\n{json.dumps(record | {'answer': 'c'})}\n")
    html = page(folder)
    assert not set(controls) & set(html)
    [prompt] = {row[1] for row in rows(html) if row[-1] == "c"}
    assert prompt.startswith(r"a\u0000\u0001")


def test_page_shows_the_values_of_the_run(full_page):
    shown = rows(full_page)
    for row in (
        ["loss", "0.8000 ± 0.0500", "0.9000 ± 0.0500", "0.8100 ± 0.0500"],
        ["gain retained after export", "", "", "99.9%"],
        ["perplexity", "3.000 ± 0.100", "3.300 ± 0.100"],
        ["KL vs. reference", "-", "0.0200 ± 0.0010"],
        ["TTFT (ms)", "-", "12.5"],
        ["arc: acc,none", "-", "0.500 ± 0.010"],
        ["exact_match", "not measured", "0.5", "missed"],
        ["Changed codes", "7 of 100"],
        ["Trained tokens", "12,345"],
        ["Duration", "2 min"],
        *(["acceptance rate", "0.41"], ["accepted length", "1.9"], ["speed-up", "1.3"]),
        ["highest", "2 at 1", "3 at 0"],
        [HOSTILE, "", "one\ntwo", HOSTILE],
        ["model/a", "cd" * 32],
    ):
        assert row in [each[: len(row)] for each in shown]
    assert "90.0% ± 1.2%" in [row[-1] for row in shown]
    assert [row[0] for row in shown if "arc" in row[0]] == ["arc: acc,none"]
    texts = "\n".join(block.get("text", "") for block in blocks(full_page))
    assert "lmx generate exports/try/model" in texts
    assert "lmx-train try.yaml seed=1 --restart" in texts
    assert RESOLVED in texts


def test_browser_without_javascript_shows_the_same_text(full_page):
    words = Page(full_page).text["pre"]
    shown = ["\t".join(row) for row in rows(full_page)]
    shown += [block["title"] for block in blocks(full_page)]
    shown += [section["title"] for section in data_of(full_page)["sections"]]
    assert [text for text in shown if text not in words] == []


@needs_node
def test_page_is_accessible(full_dom):
    """Tables have captions and headings; charts have descriptions and focus; scroll
    regions have labels and focus; headings skip no level."""
    dom = full_dom.partition("</noscript>")[2]
    tables = re.findall(r"<table.*?</table>", dom, re.DOTALL)
    assert len(tables) > 10
    for table in tables:
        assert re.search(r"<caption><span>[^<]", table)
        for row in re.findall(r"<tr>.+?</tr>", table, re.DOTALL):
            assert '<th scope="' in row
    parsed = Page(dom)
    pictures = [a for a in parsed.all("svg") if "aria-hidden" not in a]
    # Loss, learning rate, speed, memory. No norms.
    assert len(pictures) == 4
    for picture in pictures:
        assert (picture["role"], picture["tabindex"]) == ("img", "0")
    assert pictures[0]["aria-label"] == "Loss, nats per token, by step"
    regions = [a for a in parsed.all("div") if a.get("class") == "scroll"]
    assert len(regions) == len(tables)
    for region in regions:
        assert (region["role"], region["tabindex"]) == ("region", "0")
        assert region["aria-label"]
    levels = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == levels.count(1) == 1
    assert set(levels) == {1, 2, 3}
    links = [a["href"].removeprefix("#") for a in parsed.all("a")]
    assert links == [a["id"] for a in parsed.all("section")] == SECTIONS
    assert '<td class="bad">missed</td>' in dom
    assert '<td style="--shade: 2" title="model.layers.0.mlp.up_proj">4/64</td>' in dom


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_page_of_a_run_that_just_started(tmp_path, status):
    manifest = MANIFEST | {"status": status, "ended": None, "stages": {}}
    folder = make_run(tmp_path / "try", report=None, manifest=manifest, records=None)
    html = page(folder)
    assert rows(html)[0][1].startswith(status)
    log = ["final_log_lines"] * (status != "running")
    assert [*sections(html)] == [*log, "commands", "recipe", "versions_and_hashes"]
    assert ("the last word" in html) == (status != "running")
    assert "lmx generate" not in html
    refreshes = [a for a in Page(html).all("meta") if a.get("http-equiv") == "refresh"]
    assert [a["content"] for a in refreshes] == ["10"] * (status == "running")


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
        assert "commands" in sections(page(folder))


def test_page_with_few_values(tmp_path):
    records = [
        row | {"loss": None, "trained_tokens_per_second": 0.0} for row in RECORDS[1:]
    ]
    folder = make_run(tmp_path / "try", records=records)
    (folder / "model").rmdir()
    html = page(folder)
    assert "lmx generate" not in html
    titles = [chart["title"] for chart in charts(html)]
    assert titles == ["Learning rate", "Speed", "Peak memory"]


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
    [(_, line)] = charts(html)[0]["lines"]
    # Neighbors are averaged: a zigzag of 2 and 3 is about 2.5 throughout.
    assert 200 < len(line) <= 240
    assert all(abs(value - 2.5) < 0.05 for _, value in line)
    assert line[-1][0] == 5000


@needs_node
def test_browser_draws_scales_and_gaps(tmp_path):
    """Ticks are round and in the range; a line has gaps for null."""
    ranges = [(0, 1), (-3, 7), (0.59, 0.6), (1e-6, 2e-3), (5, 123456), (5, 5), (0, 0)]
    lines = [{"line": [(1, low), (2, high)]} for low, high in ranges]
    points = [(0, 2.0), (1, None), (2, 4.0), (3, 2.0)]
    lines += [{"gap": points, "none": [(0, None)]}, {"none": [(0, None)]}]
    shown = {"Charts": [line_chart("a", "b", each) for each in lines]}
    dom = drawn(render("charts", [], shown), tmp_path)
    pictures = re.findall(r'<svg viewBox="0 0 360.*?</svg>', dom, re.DOTALL)
    assert len(pictures) == len(ranges) + 1
    for (low, high), picture in zip(ranges, pictures, strict=False):
        ticks = re.findall(r'y="([\d.]+)" text-anchor="end">([^<]+)<', picture)[:-1]
        places = [float(y) - 4 for y, _ in ticks]
        values = [float(text.replace(",", "")) for _, text in ticks]
        assert 2 <= len(ticks) <= 6
        assert places == sorted(places, reverse=True)
        assert 10 <= places[-1] <= places[0] <= 172
        step = values[1] - values[0]
        assert f"{step:.0e}"[0] in "125"
        # A single value is in the middle.
        height = (places[0] - places[1]) / step
        marks = [float(y) for y in re.findall(r'cy="([\d.]+)"', picture)]
        for y, value in zip(marks, (low, high), strict=True):
            assert y == pytest.approx(places[0] - (value - values[0]) * height, abs=1)
    assert re.findall(r'class="line line-1" d="(.*?)"', pictures[-1]) == [
        "M62 172M247.3 10L340 172"
    ]
    assert pictures[-1].count("<circle") == 3


def test_layer_map_has_a_cell_for_every_layer():
    bits, error = layer_maps(REPORT["models"])
    columns = ["block", "mlp.up_proj", "router", "outside of blocks"]
    assert bits["columns"] == error["columns"] == columns
    for table, texts, darker in (
        (bits, [["4/64"], ["2/64", "4/64"], ["16"]], (0, 1)),
        (error, [["0.8"], ["11", "-"], ["0"]], (1, 0)),
    ):
        assert [row[0] for row in table["rows"]] == ["0", "1", "model.embed_tokens"]
        cells = [[cell for cell in row[1:] if cell] for row in table["rows"]]
        assert [[cell["text"] for cell in row] for row in cells] == texts
        dark, light = (cells[row][0]["style"] for row in darker)
        assert dark > light
    assert bits["rows"][0][2:] == bits["rows"][1][3:] * 2 == ["", ""]
