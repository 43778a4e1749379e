"""Latency and throughput of a server under load, measured by inference-perf.

inference-perf (kubernetes-sigs) sends the requests, from a process of its own: a client
in Python beside the server would measure itself. It needs Python 3.12, so it is a
program that the user installs, not a library of lmx. (guidellm was tried too: its
Poisson profile with a rate of 1 sent 456 requests in 10 seconds, and it needs torch.)
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FAILED, UserError

PROGRAM = "inference-perf"
PERCENTILES = {"p50": "median", "p90": "p90", "p99": "p99"}
LATENCIES = {
    "ttft_ms": "time_to_first_token",
    "inter_token_ms": "inter_token_latency",
    "latency_ms": "request_latency",
}
START_SECONDS = 15
"""Time in which the program starts and reads the tokenizer."""
DRAIN_SECONDS = 600
"""Time for the requests that are open at the end of a stage."""
LOG_LINES = 12


@dataclass(frozen=True)
class LoadPlan:
    """What is sent.

    Attributes:
        url: of the server.
        model: its name there.
        tokenizer: a folder or Hub id, for prompts of so many tokens.
        rates: requests a second, in a Poisson process.
        concurrencies: numbers of clients that each send the next request when they
            have their answer.
        seconds: of each rate.
        requests: of each client.
        prompt_tokens, output_tokens: means of each request; a quarter is the standard
            deviation.
        shared_prefix: tokens of a system prompt that all requests begin with.
        max_ttft, max_inter_token: limits in seconds for goodput.
    """

    url: str
    model: str
    tokenizer: str
    rates: Sequence[float]
    concurrencies: Sequence[int]
    seconds: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix: int = 0
    max_ttft: float = 1.0
    max_inter_token: float = 0.1
    api_key: str | None = None
    seed: int = 0

    @property
    def loads(self) -> list[tuple[str, float]]:
        """The kind and value of every load, in order."""
        rates = [("rate", rate) for rate in self.rates]
        return rates + [("concurrency", count) for count in self.concurrencies]


def require_program() -> str:
    """The path of inference-perf.

    Raises:
        UserError: it is not installed.
    """
    if path := shutil.which(PROGRAM):
        return path
    raise UserError(
        f"{PROGRAM} is not installed",
        hint=f"install it with Python 3.12: uv tool install {PROGRAM}",
    )


def measure_load(plan: LoadPlan) -> Iterator[dict]:
    """Yield a row for every load; figures are None where no request succeeded.

    Raises:
        UserError: inference-perf is not installed, or it fails.
    """
    program = require_program()
    limit = 10 * (START_SECONDS + plan.seconds) + DRAIN_SECONDS
    for kind, value in plan.loads:
        with tempfile.TemporaryDirectory() as folder:
            config = _config(plan, kind, value, Path(folder))
            try:
                run = subprocess.run(
                    [program, "-c", str(config), "--log-level", "WARNING"],
                    capture_output=True,
                    text=True,
                    timeout=limit,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise UserError(
                    f"{PROGRAM} has not ended after {limit} seconds", code=FAILED
                ) from None
            summary = Path(folder, "out", "summary_lifecycle_metrics.json")
            if run.returncode or not summary.is_file():
                lines = (run.stdout + run.stderr).strip().splitlines()[-LOG_LINES:]
                message = "\n".join([f"{PROGRAM} failed:", *lines])
                raise UserError(message, place=plan.url, code=FAILED)
            record = json.loads(summary.read_text("utf-8"))
        done, failed = record["successes"], record["failures"]
        latency, throughput = done.get("latency") or {}, done.get("throughput") or {}
        row: dict[str, Any] = {"kind": kind, "load": value}
        row |= {"requests": done["count"], "errors": failed["count"]}
        for name, source in LATENCIES.items():
            values = latency.get(source) or {}
            row[name] = {
                ours: None if values.get(theirs) is None else 1000 * values[theirs]
                for ours, theirs in PERCENTILES.items()
            }
        row["requests_per_second"] = throughput.get("requests_per_sec")
        row["output_tokens_per_second"] = throughput.get("output_tokens_per_sec")
        good = done.get("goodput_metrics") or {}
        total = done["count"] + failed["count"]
        row["goodput"] = good.get("good_requests", 0) / total if total else None
        yield row


def _config(plan: LoadPlan, kind: str, value: float, folder: Path) -> Path:
    """The file that inference-perf reads; JSON is YAML."""
    requests = plan.requests * int(value)
    stage: dict[str, Any] = {"concurrency_level": value, "num_requests": requests}
    if kind == "rate":
        stage = {"rate": value, "duration": plan.seconds}
        requests = 2 * int(value * plan.seconds) + 10
    data: dict[str, Any] = {
        "type": "random",
        "input_distribution": _distribution(plan.prompt_tokens, requests),
        "output_distribution": _distribution(plan.output_tokens, requests),
    }
    if plan.shared_prefix:
        shared = {
            "num_groups": 1,
            "num_prompts_per_group": requests,
            "system_prompt_len": plan.shared_prefix,
            "question_len": plan.prompt_tokens,
            "output_len": plan.output_tokens,
            "seed": plan.seed,
        }
        data = {"type": "shared_prefix", "shared_prefix": shared}
    config = {
        "load": {
            "type": "poisson" if kind == "rate" else "concurrent",
            "stages": [stage],
            "num_workers": 1,
            "worker_max_concurrency": 1000,
            "base_seed": plan.seed,
            "stage_teardown_grace_seconds": DRAIN_SECONDS,
        },
        "api": {"type": "completion", "streaming": True},
        "server": {
            "type": "vllm",
            "model_name": plan.model,
            "base_url": plan.url,
            "ignore_eos": True,
            "api_key": plan.api_key,
        },
        "tokenizer": {"pretrained_model_name_or_path": plan.tokenizer},
        "data": data,
        "report": {
            "request_lifecycle": {
                "summary": True,
                "per_stage": False,
                "per_request": False,
                "percentiles": [50, 90, 99],
                "use_server_output_tokens": True,
            },
            "goodput": {
                "constraints": {"ttft": plan.max_ttft, "itl": plan.max_inter_token}
            },
        },
        "storage": {"local_storage": {"path": str(folder / "out")}},
    }
    file = folder / "config.yaml"
    # The file has the API key.
    file.touch(mode=0o600)
    file.write_text(json.dumps(config))
    return file


def _distribution(mean: int, count: int) -> dict:
    limits = {"min": max(1, mean // 4), "max": 2 * mean}
    return limits | {"mean": mean, "std_dev": mean / 4, "total_count": count}


COLUMNS = (
    *("load", "requests", "errors", "TTFT (ms)", "inter-token (ms)"),
    *("requests/s", "tokens/s", "goodput", "per million"),
)


def label(kind: str, value: float) -> str:
    """The name of a load."""
    return f"{value:.3g}/s" if kind == "rate" else f"{value:.0f} clients"


def cells(row: dict) -> list[str]:
    """The cells of a load, by `COLUMNS`; times are p50 / p90 / p99."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    def percentiles(name: str, form: str) -> str:
        return " / ".join(number(value, form) for value in row[name].values())

    return [
        *(label(row["kind"], row["load"]), str(row["requests"]), str(row["errors"])),
        percentiles("ttft_ms", "{:,.0f}"),
        percentiles("inter_token_ms", "{:,.1f}"),
        number(row["requests_per_second"], "{:.2f}"),
        number(row["output_tokens_per_second"], "{:.1f}"),
        number(row["goodput"], "{:.0%}"),
        number(row.get("cost_per_million"), "{:,.2f}"),
    ]


def cost_per_million(row: dict, price_per_hour: float) -> float | None:
    """The price of a million tokens of output, at a price of the machine."""
    rate = row["output_tokens_per_second"]
    return price_per_hour / 3600 / rate * 1e6 if rate else None
