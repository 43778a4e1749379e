"""`lmx bench --load`: a server under load."""

import argparse
import json
import os
import urllib.error
import urllib.request
from pathlib import Path

from ..errors import UserError
from ..run import terminal
from .serve import API_KEY

ROW = "{:>10}{:>10}{:>8}{:>24}{:>22}{:>12}{:>10}{:>9}{:>13}"
DEFAULTS = {
    "rates": [],
    "concurrency": [1, 4, 16],
    "duration": 30,
    "requests": 4,
    "shared_prefix": 0,
    "max_ttft": 1.0,
    "max_inter_token": 0.1,
    "price_per_hour": None,
    "report": None,
}
"""The options that need `--load`, and their values."""


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx bench --load`."""
    group = parser.add_argument_group(
        "load", "a server under load, by inference-perf; MODEL gives the tokenizer"
    )

    def add(name: str, kind, metavar: str, about: str) -> None:
        group.add_argument(name, type=kind, metavar=metavar, help=about)

    add("--load", str, "URL", "the server, such as http://127.0.0.1:8080")
    add("--rates", _rates, "X,X", "requests a second, in a Poisson process")
    about = "clients that send one request after the other; default 1,4,16"
    add("--concurrency", counts, "N,N", about)
    add("--duration", int, "S", "seconds of every rate; default 30")
    add("--requests", int, "N", "requests of every client; default 4")
    add("--shared-prefix", int, "N", "tokens that all prompts begin with")
    add("--max-ttft", float, "S", "limit for goodput; default 1")
    add("--max-inter-token", float, "S", "limit for goodput, a mean; default .1")
    add("--price-per-hour", float, "X", "of the machine: price per million tokens")
    add("--report", Path, "FILE", "write a page with charts")


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < 1e6 for rate in rates):
        message = f"expected rates above 0, such as 0.5,1,2; got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return rates


def counts(text: str) -> list[int]:
    """Numbers from 1, of an argument."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        message = f"expected numbers from 1, such as 1,4,16; got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return [int(part) for part in parts]


def load_argument_faults(args: argparse.Namespace) -> dict[str, bool]:
    """Messages about the arguments, and whether they apply."""
    given = [name for name in DEFAULTS if getattr(args, name) is not None]
    names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    limits = ("duration", "requests", "max_ttft", "max_inter_token", "price_per_hour")
    faults = {f"{names} needs --load": bool(given) and not args.load}
    for name in limits:
        value = getattr(args, name)
        about = f"--{name.replace('_', '-')} must be more than 0, got {value}"
        faults[about] = value is not None and value <= 0
    return faults


def bench_load(args: argparse.Namespace) -> int:
    """Measure; the exit code is 0.

    Raises:
        UserError: inference-perf is not installed, or the server does not answer.
    """
    from ..evaluation import server_load
    from ..evaluation.server_load import COLUMNS, cells

    server_load.require_program()
    given = {
        name: default if getattr(args, name) is None else getattr(args, name)
        for name, default in DEFAULTS.items()
    }
    if args.rates and args.concurrency is None:
        given["concurrency"] = []
    key, url = os.environ.get(API_KEY) or None, args.load.rstrip("/")
    plan = server_load.LoadPlan(
        url=url,
        model=_served_model(url, key),
        tokenizer=os.path.expanduser(args.model),
        rates=given["rates"],
        concurrencies=given["concurrency"],
        seconds=given["duration"],
        requests=given["requests"],
        prompt_tokens=args.prompt_lengths[0],
        output_tokens=args.tokens,
        shared_prefix=given["shared_prefix"],
        max_ttft=given["max_ttft"],
        max_inter_token=given["max_inter_token"],
        api_key=key,
    )
    if not args.json:
        terminal.write_out(f"{plan.url}: {plan.model}\n{ROW.format(*COLUMNS)}\n")
    rows = []
    loads = server_load.measure_load(plan)
    for number, (kind, value) in enumerate(plan.loads):
        left = len(plan.loads) - number
        # The time of a number of clients is not known before.
        about = f"about {plan.seconds} s" if kind == "rate" else "some time"
        load = server_load.label(kind, value)
        terminal.write_err(f"{load}: {about}, {left - 1} loads after it\n")
        row = next(loads)
        if price := args.price_per_hour:
            row["cost_per_million"] = server_load.cost_per_million(row, price)
        rows.append(row)
        if not args.json:
            terminal.write_out(ROW.format(*cells(row)) + "\n")
    if args.report:
        from ..run.html.load_page import load_page

        table = [*COLUMNS], [cells(row) for row in rows]
        page = load_page(plan.url, plan.model, rows, table)
        args.report.write_text(page, "utf-8")
    if args.json:
        terminal.write_json({plan.url: rows}, indent=2)
    return 0


def _served_model(url: str, key: str | None) -> str:
    """The name of the first model of a server.

    Raises:
        UserError: there is no server, or it has no model.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())["data"][0]["id"]
    except urllib.error.HTTPError as error:
        hint = f"set {API_KEY}" if error.code == 401 else None
        message = f"the server answers with status {error.code}"
        raise UserError(message, place=url, hint=hint) from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        hint = "start it: lmx serve MODEL"
        message = "there is no OpenAI endpoint here"
        raise UserError(message, place=url, hint=hint) from error
