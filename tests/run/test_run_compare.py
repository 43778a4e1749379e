"""`lmx compare` and `lmx report` from the command line, and the table of a sweep."""

import json

import pytest
from lmx.cli import main
from lmx.pipeline.plan import load
from lmx.run.compare import groups_table
from lmx.run.report import Record
from page_data import charts, rows
from sample_runs import MANIFEST, REPORT, make_run

OTHER = json.loads(json.dumps(REPORT))
OTHER["models"]["quantized"] |= {"perplexity": 3.63, "kl_mean": None}


@pytest.fixture
def runs(tmp_path):
    one = make_run(tmp_path / "one")
    two = make_run(tmp_path / "two", report=OTHER)
    changed = (
        (two / "resolved.yaml").read_text().replace("steps: 3", "steps: 9, new: 1")
    )
    (two / "resolved.yaml").write_text(changed.replace("exports/try", "else/where"))
    return str(one), str(two)


def row(text, label):
    [line] = [line for line in text.splitlines() if line.startswith(label)]
    return line.removeprefix(label).strip()


def test_compare_prints_metrics_and_recipe_differences(runs, capsys):
    assert main.main(["compare", *runs]) == 0
    text = capsys.readouterr().out
    assert row(text, "perplexity") == "3.300 ± 0.100  3.630 ± 0.100 (+10.0%)"
    assert row(text, "size, MB").split() == ["3.00", "3.00"]
    assert row(text, "thresholds passed").split() == ["1", "of", "2"] * 2
    assert row(text, "stages.1.train.steps").split() == ["3", "9"]
    assert row(text, "stages.1.train.new").split() == ["-", "1"]
    assert "output" not in text


def test_compare_hides_the_defaults_of_blocks_that_one_run_has(tmp_path, capsys):
    runs = []
    for name in ("qat_4bit", "ptq_4bit"):
        runs.append(str(make_run(tmp_path / name)))
        text = load(f"recipes/{name}.yaml").resolved
        (tmp_path / name / "resolved.yaml").write_text(text)
    assert main.main(["compare", *runs]) == 0
    text = capsys.readouterr().out
    assert row(text, "stages.1.train.steps").split() == ["600", "-"]
    assert row(text, "stages.1.quantize.method").split() == ["-", '"gptq"']
    assert row(text, "stages.2.evaluate.thresholds.max_kl").split() == ["0.05", "0.1"]
    assert "beta1" not in text
    assert text.count("stages.") < 20


def test_compare_json_has_all_metrics_and_differences(runs, capsys):
    assert main.main(["compare", *runs, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in output["runs"]] == ["one", "two"]
    assert output["runs"][1]["metrics"]["perplexity"] == 3.63
    assert output["differences"]["stages.1.train.steps"] == {"one": "3", "two": "9"}


def test_compare_accepts_report_files(runs, tmp_path, capsys):
    copy = tmp_path / "copy.json"
    copy.write_text(json.dumps(OTHER))
    report = f"{runs[0]}/report.json"
    assert main.main(["compare", report, str(copy), runs[1]]) == 0
    text = capsys.readouterr().out
    assert row(text, "status").split() == ["-", "-", "done"]
    assert "stages.1.train" not in text
    assert main.main(["compare", report, "--json"]) == 0
    [run] = json.loads(capsys.readouterr().out)["runs"]
    assert (run["status"], run["recipe"], run["model"]) == (None, {}, "quantized")


def test_compare_html_has_tables_and_curves(runs, tmp_path, capsys):
    target = tmp_path / "side.html"
    assert main.main(["compare", *runs, "--html", str(target)]) == 0
    assert capsys.readouterr().out.rstrip().endswith(str(target))
    html = target.read_text()
    assert ["perplexity", "3.300 ± 0.100", "3.630 ± 0.100 (+10.0%)"] in rows(html)
    assert ["stages.1.train.steps", "3", "9"] in rows(html)
    loss, training = (chart["table"] for chart in charts(html)[:2])
    assert loss["columns"] == training["columns"] == ["step", "one", "two"]
    assert training["rows"][0] == ["1", "2", "2"]


def test_compare_extends_equal_names(tmp_path, capsys):
    folders = [str(make_run(tmp_path / part / "try")) for part in "ab"]
    assert main.main(["compare", *folders]) == 0
    text = capsys.readouterr().out
    assert "a/try" in text
    assert "b/try" in text


@pytest.mark.parametrize("name", ["", "gone", "one/recipe.yaml"])
def test_compare_refuses_missing_runs(runs, tmp_path, name, capsys):
    assert main.main(["compare", runs[0], str(tmp_path / name)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert main.main(["compare", runs[0], runs[0]]) == 2


def test_report_writes_the_page_again(runs, capsys):
    assert main.main(["report", runs[0]]) == 0
    assert capsys.readouterr().out == f"{runs[0]}/report.html\n"
    assert main.main(["report", f"{runs[0]}/model"]) == 2


def test_table_has_means_and_standard_errors_over_seeds(tmp_path):
    def run(rate: str, seed: int, loss: float, status: str = "done") -> tuple:
        records = [
            {"stage": "1-train", "kind": "valid", "step": step, "loss": value}
            for step, value in enumerate((9.0, loss))
        ]
        folder = make_run(
            tmp_path / f"{rate}-{seed}",
            report={"models": {"m": {"perplexity": 10 * loss}}},
            manifest=MANIFEST | {"status": status},
            records=records,
        )
        return {"rate": rate, "seed": str(seed)}, Record(folder)

    runs = [run("1", 0, 1.0), run("1", 1, 2.0), run("1", 2, 6.0)]
    runs += [run("2", 0, 4.0), run("2", 1, 100.0, "failed")]
    runs.append(({"rate": "2", "seed": "2"}, None))
    # The standard deviation of 1, 2 and 6 is sqrt(7).
    first = ["1", "3 of 3", "3.0000 ± 1.5275", "30.000 ± 15.275"]
    second = ["2", "1 of 3", "4.0000", "40.000"]
    columns = ["rate", "finished", "validation loss", "perplexity"]
    # Few groups with many metrics have metrics as rows.
    lines = [[*line] for line in zip(columns, first, second, strict=True)]
    assert groups_table(runs) == (lines[0], lines[1:])
    third = [({"rate": "3", "seed": "0"}, None)]
    rows = [first, second, ["3", "0 of 1", "-", "-"]]
    assert groups_table(runs + third) == (columns, rows)
