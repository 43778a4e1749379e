"""`lmx bench`: tables of how fast a model generates."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..models.checkpoint import model_folder
from .generate import add_draft, draft_faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..evaluation.throughput import BenchmarkArms
    from ..generation.speculative.proposer import Proposer
    from ..models.loader import LoadedModel


HEAD = "Three figures are p50 / p90 / p99: so many percent are no worse.\n"
COLUMNS = (
    *("prompt", "rows", "column", "first token, ms", "prefill, tokens/s"),
    *("decode, tokens/s", "peak GB", "speed-up", "stood"),
)
ROW = "{:>6}{:>6}  {:<18}{:>21}{:>25}{:>25}{:>9}{:>10}{:>7}"
RATES = ("prefill_tokens_per_second", "decode_tokens_per_second")
RUNG = "{:<26}{:>10}{:>10}{:>12}{:>17}{:>8}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx bench`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="model folder, run folder or Hub id")
    add("--compare", metavar="OTHER", help="a second model, measured the same way")
    add("--prompt-lengths", type=_numbers, default=[32, 512], metavar="N,N")
    add("--batch-sizes", type=_numbers, default=[1, 4, 16], metavar="N,N")
    add("--tokens", type=int, default=64, metavar="N", help="decoded; default 64")
    add("--repeats", type=int, default=5, metavar="N", help="runs of a case; default 5")
    add("--corpus", metavar="FILE", help="to cut prompts from; absent = lmx's own code")
    add_draft(parser)
    add(
        "--ladder",
        action="store_true",
        help="what a cache, 4-bit weights, batches and guesses gain, one by one",
    )
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--trust-remote-code", action="store_true", help="run the model's own Python")


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError
    return numbers


def run(args: argparse.Namespace) -> int:
    """Measure; the exit code is 0.

    Raises:
        UserError: no such model, a prompt longer than its positions.
    """
    _check(args)
    from .. import cpu

    cpu.enable()
    from ..convert.importers import load_model

    found = {}
    for name in filter(None, [args.model, args.compare]):
        loaded = load_model(
            model_folder(name), trust_remote_code=args.trust_remote_code
        )
        measure = _ladder if args.ladder else _bench
        if not args.json:
            sys.stdout.write(f"{name}\n")
        found[name] = measure(args, loaded)
    if args.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    elif args.compare:
        _compare(*found.values())
    return 0


def _check(args: argparse.Namespace) -> None:
    faults = {
        "--tokens must be 2 or more": args.tokens < 2,
        "--repeats must be 1 or more": args.repeats < 1,
        "--compare is the model itself": args.compare == args.model,
        "--ladder climbs one model: no --compare with it": (
            args.ladder and args.compare is not None
        ),
        **draft_faults(args),
    }
    for fault, holds in faults.items():
        if holds:
            raise UserError(fault)


def _text(args: argparse.Namespace, loaded: "LoadedModel") -> list[int]:
    """The tokens that prompts are cut from."""
    from ..evaluation.throughput import sample_text
    from ..generation.prompt import encode_text

    try:
        text = Path(args.corpus).read_text(encoding="utf-8") if args.corpus else None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the text cannot be read: {error}", place=args.corpus
        ) from error
    tokens = encode_text(loaded.tokenizer, text or sample_text())
    positions = getattr(
        getattr(loaded.model, "args", None), "max_position_embeddings", 0
    )
    longest = max(args.prompt_lengths)
    if positions and longest + args.tokens > positions:
        raise UserError(
            f"prompts of {longest} tokens and answers of {args.tokens} do not fit: the "
            f"model has positions for {positions}",
            hint="choose others with --prompt-lengths and --tokens",
        )
    return tokens


def _makers(
    args: argparse.Namespace, loaded: "LoadedModel", tokens: list[int]
) -> dict[str, "Callable[[], Proposer]"]:
    """The proposers to compare, by the name of their column."""
    from ..convert.importers import load_model
    from ..generation.speculative.factory import PROMPT_LOOKUP, proposer_factory
    from ..generation.speculative.prompt_lookup import PromptLookupProposer

    makers = {PROMPT_LOOKUP: PromptLookupProposer}
    if args.draft_model and args.draft_model != PROMPT_LOOKUP:
        make = proposer_factory(
            args.draft_model,
            loaded,
            tokens,
            load_draft=partial(load_model, trust_remote_code=args.trust_remote_code),
        )
        if make:
            makers[f"draft {Path(args.draft_model).name}"] = make
        else:
            sys.stderr.write("no draft pays here\n")
    return makers


def _ways(
    args: argparse.Namespace, loaded: "LoadedModel", tokens: list[int]
) -> "BenchmarkArms":
    from ..generation.engine import Generator
    from ..generation.speculative.factory import draft_length_controller

    def guessing(propose):
        return lambda: Generator(
            loaded.model,
            loaded.tokenizer,
            make_proposer=propose,
            draft_length=draft_length_controller(args.num_draft_tokens),
            sequential_verify=args.sequential_verify,
        )

    makers = _makers(args, loaded, tokens).items()
    plain = {"plain": lambda: Generator(loaded.model, loaded.tokenizer)}
    return plain | {name: guessing(propose) for name, propose in makers}


def _bench(args: argparse.Namespace, loaded: "LoadedModel") -> list[dict]:
    from ..evaluation.throughput import BenchmarkPlan, run_benchmark
    from ..generation.batching import BatchGenerator
    from .interactive import flips

    if max(args.batch_sizes) > 1:
        # Refuses, before anything is measured, a model that cannot.
        BatchGenerator(loaded.model)

    tokens = _text(args, loaded)
    ways = _ways(args, loaded, tokens)
    sizes = args.prompt_lengths, args.batch_sizes, args.tokens, args.repeats
    if not args.json:
        sys.stdout.write(HEAD + ROW.format(*COLUMNS) + "\n")
    found = []
    for row in run_benchmark(
        tokens, BenchmarkPlan(*sizes, check_parity=args.check_parity), ways
    ):
        found.append(row)
        if not args.json:
            sys.stdout.write(_cells(row) + "\n")
            if "parity" in row:
                sys.stdout.write(f"{'':15}{flips(row['parity'])}\n")
            sys.stdout.flush()
    return found


def _compare(ours: list[dict], others: list[dict]) -> None:
    """The second model's speed as a multiple of the first's."""
    sys.stdout.write("tokens/s of the second over the first, p50\n")
    same = {_case(row): row for row in ours}
    for row in others:
        if first := same.get(_case(row)):
            ratios = (row[rate]["p50"] / first[rate]["p50"] for rate in RATES)
            sys.stdout.write(
                "prompt {}, rows {}, {}: ".format(*_case(row))
                + "prefill {:.2f}x, decode {:.2f}x\n".format(*ratios)
            )


def _case(row: dict) -> tuple:
    return row["prompt"], row["rows"], row["column"]


def _cells(row: dict) -> str:
    def three(name: str, digits: int = 0) -> str:
        return " / ".join(f"{value:,.{digits}f}" for value in row[name].values())

    stood = row.get("acceptance_rate")
    return ROW.format(
        row["prompt"],
        row["rows"],
        row["column"],
        three("ttft_ms"),
        three("prefill_tokens_per_second"),
        three("decode_tokens_per_second", 1),
        f"{row['peak_memory_gb']:.2f}",
        f"{row['speedup']:.2f}x",
        "-" if stood is None else f"{stood:.0%}",
    )


def _ladder(args: argparse.Namespace, loaded: "LoadedModel") -> list[dict]:
    from ..evaluation.ladder import SpeedAblation
    from ..evaluation.memory_bandwidth import memory_traffic
    from ..evaluation.throughput import prompts
    from ..generation.speculative.factory import draft_length_controller

    tokens = _text(args, loaded)
    texts = prompts(tokens, max(args.prompt_lengths), max(args.batch_sizes))
    propose = list(_makers(args, loaded, tokens).values())[-1]
    guesses = draft_length_controller(args.num_draft_tokens)
    rungs = SpeedAblation(loaded, texts, args.tokens, propose, guesses, args.repeats)
    traffic = memory_traffic()
    rows = rungs.climb(traffic)
    if not args.json:
        head = (
            "step",
            "tokens/s",
            "speed-up",
            "cumulative",
            "roofline, tok/s",
            "share",
        )
        sys.stdout.write(f"memory traffic {traffic / 1e9:,.1f} GB/s\n")
        for cells in [head, *map(_rung, rows)]:
            sys.stdout.write(RUNG.format(*cells).rstrip() + "\n")
    return rows


def _rung(row: dict) -> tuple[str, ...]:
    if row["note"]:
        return row["step"], "-", "-", "-", "-", f"  {row['note']}"
    ratios = (row[name] for name in ("speedup", "cumulative"))
    return (
        row["step"],
        f"{row['tokens_per_second']:,.1f}",
        *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
        f"{row['roofline_tokens_per_second']:,.0f}",
        f"{row['roofline_share']:.0%}",
    )
