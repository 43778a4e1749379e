"""docs/serving.md and the table of differences say what the server does."""

import argparse
import re
import shlex
import sys
from pathlib import Path

import httpx
from lmx.cli.main import verb_parser
from lmx.serving.protocol import (
    IGNORED,
    OLD_NAMES,
    ChatCompletionParameters,
    CompletionParameters,
)

sys.path.append(str(Path(__file__).parents[2] / "benchmarks/generation"))

import compare_servers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/serving.md").read_text()
RESULTS = (ROOT / "benchmarks/results/generation.md").read_text()


def rows(section: str, page: str = PAGE) -> list[list[str]]:
    """The cells of the tables below a heading, without their heads."""
    text = re.search(rf"^##+ {section}\n(.*?)^##", page, re.DOTALL | re.MULTILINE)[1]
    tables = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


def names(section: str) -> list[str]:
    """The names in the first column of a table."""
    return [n for row in rows(section) for n in re.findall(r"`([^`]+)`", row[0])]


def test_every_option_is_described():
    actions = verb_parser("serve")._actions
    options = {a.option_strings[-1] for a in actions if a.option_strings}
    hidden = {"--help", "--debug"}
    assert sorted(names("Options")) == sorted(options - hidden)


def test_shown_defaults_are_those_of_the_parser():
    parser = verb_parser("serve")
    defaults = {
        f"--{k.replace('_', '-')}": v for k, v in vars(parser.parse_args(["m"])).items()
    }
    shown = {
        re.findall(r"`([^`]+)`", cells[0])[0]: match[1]
        for cells in rows("Options")
        if (match := re.search(r"default:? `?(\d[\d.]*\d|\d)", cells[1]))
    }
    assert len(shown) == 7
    assert {k: str(defaults[k]).removesuffix(".0") for k in shown} == shown


def test_every_parameter_is_described():
    fields = {
        *ChatCompletionParameters.model_fields,
        *CompletionParameters.model_fields,
        *OLD_NAMES,
    }
    shown = names("Parameters")
    assert sorted(shown) == sorted(fields)
    [ignored] = [row for row in rows("Parameters") if "without effect" in row[1]]
    assert re.findall(r"`([^`]+)`", ignored[0]) == [*IGNORED]


def test_every_metric_is_described(server):
    text = server.client.get("/metrics").text
    declared = re.findall(r"^# TYPE lmx:(\w+) (\w+)$", text, re.MULTILINE)
    kinds = {
        name: row[1]
        for row in rows("Metrics")
        for name in re.findall(r"`(\w+)`", row[0])
    }
    assert kinds == dict(declared)


PROBES = {probe.name: probe for probe in compare_servers.PROBES}
DIFFERENCES = {
    row[0].strip("|` "): row[1] for row in rows("Differences to other servers", RESULTS)
}


def test_answers_are_those_of_the_table(server):
    for name, probe in PROBES.items():
        outcome = compare_servers.ask(server.client, probe)
        assert outcome.status == DIFFERENCES.get(name, "200")[:3] or (
            name == "unknown path" and outcome.status == "404"
        ), name
        assert not outcome.is_last
        if outcome.status == "200" and probe.content:
            several = name in ("chat, n 2, temperature 1", "completion, two prompts")
            assert len(outcome.finish) == 1 + several
            assert set(outcome.finish) <= {"stop", "length"}
        elif outcome.status != "200":
            assert {"error.message", "error.type"} <= outcome.fields


def test_the_table_names_requests():
    assert len(PROBES) == len(compare_servers.PROBES) == 40
    assert DIFFERENCES.keys() <= PROBES.keys()
    assert f"answer {len(DIFFERENCES)} in another way" in PAGE


def test_compare_prints_its_tables(server):
    probes = [PROBES[name] for name in ("completion", "no JSON", "a list")]
    servers = {"lmx": server.url, "other": server.url}
    text = "\n".join(compare_servers.compare(servers, probes))
    table = [re.split(r" {2,}", line.strip()) for line in text.splitlines()[:4]]
    assert table == [
        ["request", "lmx", "other"],
        ["completion", "200 length", "200 length"],
        ["no JSON", "400", "400"],
        ["a list", "400", "400"],
    ], text
    assert text.count("fields of ") == 2


def test_shown_client_runs(server, capsys):
    [program] = re.findall(
        r"^```python server\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
    )
    program = program.replace("http://127.0.0.1:8080", server.url)
    exec(program, {})
    assert capsys.readouterr().out


def test_shown_request_is_answered(server):
    line, _ = re.findall(r"^curl (.*)$", PAGE, re.MULTILINE)
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-H")
    parser.add_argument("-d")
    shown = parser.parse_args(shlex.split(line))
    name, _, value = shown.H.partition(": ")
    url = shown.url.replace("http://127.0.0.1:8080", server.url)
    answer = server.client.post(url, content=shown.d, headers={name: value})
    assert answer.status_code == 200


def test_shown_error_is_the_answer(server):
    [shown] = re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokns": 1})
    assert answer.status_code == 400
    assert answer.json() == httpx.Response(200, content=shown).json()
