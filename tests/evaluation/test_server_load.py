"""`lmx bench --load`: what inference-perf is asked, and what it answers."""

import json
import os
import stat
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from lmx.cli.main import main
from lmx.evaluation.server_load import cost_per_million
from page_data import charts

# A stand-in for the program: it keeps its configuration, and writes a summary.
PROGRAM = f"""#!{sys.executable}
import json, os, pathlib, sys
config = json.loads(pathlib.Path(sys.argv[2]).read_text())
kept = pathlib.Path(os.environ["KEPT"])
mode = os.stat(sys.argv[2]).st_mode & 0o777
kept.write_text(kept.read_text() + json.dumps(config | {{"mode": mode}}) + "\\n")
if os.environ.get("FAILS"):
    sys.exit("no route to the server")
out = pathlib.Path(config["storage"]["local_storage"]["path"])
out.mkdir()
times = {{"median": 0.25, "p90": 0.5, "p99": 1.5}}
names = "time_to_first_token", "inter_token_latency", "request_latency"
done = {{
    "count": 9,
    "latency": dict.fromkeys(names, times),
    "throughput": {{"requests_per_sec": 2.0, "output_tokens_per_sec": 50.0}},
    "goodput_metrics": {{"good_requests": 6}},
}}
summary = {{"successes": done, "failures": {{"count": 3}}}}
(out / "summary_lifecycle_metrics.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The stand-in on the path; returns the file with its configurations."""
    folder = tmp_path / "bin"
    folder.mkdir()
    file = folder / "inference-perf"
    file.write_text(PROGRAM)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    kept = tmp_path / "kept"
    kept.touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("KEPT", str(kept))
    return kept


@pytest.fixture
def url():
    """A server with a model and a key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            allowed = self.headers["Authorization"] == "Bearer secret"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "small"}]}).encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_loads_are_measured_one_by_one(program, url, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("LMX_API_KEY", "secret")
    page = tmp_path / "load.html"
    options = ["--rates", "0.5,2", "--concurrency", "4", "--duration", "7"]
    options += ["--tokens", "32", "--shared-prefix", "100", "--max-ttft", "0.3"]
    options += ["--price-per-hour", "0.9", "--report", str(page), "--json"]
    assert main(["bench", "folder", "--load", f"{url}/", *options]) == 0
    output = capsys.readouterr()
    rows = json.loads(output.out)[url]
    assert [(r["kind"], r["load"]) for r in rows] == [
        *(("rate", 0.5), ("rate", 2.0)),
        ("concurrency", 4),
    ]
    assert rows[0]["ttft_ms"] == {"p50": 250.0, "p90": 500.0, "p99": 1500.0}
    assert (rows[0]["requests"], rows[0]["errors"], rows[0]["goodput"]) == (9, 3, 0.5)
    assert rows[0]["cost_per_million"] == pytest.approx(0.9 / 3600 / 50 * 1e6)
    assert output.err.count("7 s") == 2
    first, _, last = map(json.loads, program.read_text().splitlines())
    assert first["load"]["type"] == "poisson"
    assert first["load"]["stages"] == [{"rate": 0.5, "duration": 7}]
    assert last["load"]["stages"] == [{"concurrency_level": 4, "num_requests": 16}]
    assert first["data"]["shared_prefix"]["system_prompt_len"] == 100
    assert first["data"]["shared_prefix"]["output_len"] == 32
    assert first["report"]["goodput"]["constraints"] == {"ttft": 0.3, "itl": 0.1}
    server = first["server"]
    assert (server["model_name"], server["api_key"]) == ("small", "secret")
    # Others on the machine must not read the key.
    assert first["mode"] == 0o600
    html = page.read_text()
    assert len(charts(html)) == 8
    assert "secret" not in html + output.out + output.err


@pytest.mark.parametrize(
    ("options", "environment", "code", "words"),
    [
        (["--rates", "0"], {}, 2, "rates above 0"),
        (["--rates", "1", "--duration", "0"], {}, 2, "--duration must be more than 0"),
        (["--concurrency", "x"], {}, 2, "numbers from 1"),
        (["--rates", "1"], {"LMX_API_KEY": ""}, 2, "status 401"),
        (["--rates", "1"], {"FAILS": "1"}, 1, "no route to the server"),
        (["--rates", "1"], {"PATH": "/nowhere"}, 2, "uv tool install inference-perf"),
    ],
)
def test_faults_are_named(
    program, url, monkeypatch, capsys, options, environment, code, words
):
    environment = {"LMX_API_KEY": "secret"} | environment
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        found = main(["bench", "folder", "--load", url, *options])
    except SystemExit as stop:
        found = stop.code
    assert found == code
    assert words in capsys.readouterr().err


def test_no_server(program, capsys):
    assert main(["bench", "folder", "--load", "http://127.0.0.1:9"]) == 2
    assert "no OpenAI endpoint" in capsys.readouterr().err


def test_load_options_need_load(capsys):
    assert main(["bench", "folder", "--rates", "1"]) == 2
    assert "--rates needs --load" in capsys.readouterr().err


def test_cost_of_nothing():
    assert cost_per_million({"output_tokens_per_second": None}, 1.0) is None
