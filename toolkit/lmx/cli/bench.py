"""`lmx bench`: latency and throughput by prompt length, batch size and decoder."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..models.checkpoint import model_folder
from ..run import terminal
from .bench_load import add_load_arguments, bench_load, counts, load_argument_faults
from .generate import parity_line
from .options import add_draft_arguments, draft_argument_faults, refuse

if TYPE_CHECKING:
    from ..evaluation.latency import BenchmarkArms
    from ..models.loader import LoadedModel


HEAD = (
    "Values are p50 / p90 / p99: so many percent of the runs are no worse.\n"
    "bandwidth: weights that decoding reads per second, of the {:.1f} GB/s that "
    "memory gives\n"
    "verify cost: one more token in a forward pass takes {:.2f} of a decoding step\n"
)
COLUMNS = (
    *("prompt", "batch", "decoder", "TTFT (ms)", "prefill, tokens/s"),
    *("decode, tokens/s", "bandwidth", "peak GB", "speed-up", "accept"),
)
ROW = "{:>6}{:>6}  {:<18}{:>21}{:>25}{:>25}{:>11}{:>9}{:>10}{:>9}"
STANDARD = "standard"


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx bench`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="model folder, run directory or Hub id")
    add("--prompt-lengths", type=counts, default=[32, 512], metavar="N,N")
    add("--batch-sizes", type=counts, default=[1, 4, 16], metavar="N,N")
    about = "tokens to decode; default 64"
    add("--tokens", type=int, default=64, metavar="N", help=about)
    add("--repeats", type=int, default=5, metavar="N", help="runs per case; default 5")
    add("--corpus", metavar="FILE", help="text for prompts; default: a sample text")
    add_draft_arguments(parser)
    add("--json", action="store_true", help="print JSON")
    add("--trust-remote-code", action="store_true", help="run the model's own Python")
    add_load_arguments(parser)


def bench(args: argparse.Namespace) -> int:
    """Measure; the exit code is 0.

    Raises:
        UserError: the model does not exist, or prompts exceed its maximum length.
    """
    refuse(
        {
            "--tokens must be 2 or more": args.tokens < 2,
            "--repeats must be 1 or more": args.repeats < 1,
            **draft_argument_faults(args),
            **load_argument_faults(args),
        }
    )
    if args.load:
        return bench_load(args)
    from .. import cpu

    cpu.enable()
    from ..convert.importers import load_model
    from ..evaluation import latency
    from ..evaluation.memory_bandwidth import measure_memory_bandwidth, weight_bytes
    from ..generation.kv_cache.batch import require_batchable
    from ..generation.prompt import encode_text

    path = model_folder(args.model)
    loaded = load_model(path, trust_remote_code=args.trust_remote_code)
    if not args.json:
        terminal.write_out(f"{args.model}\n")
    lengths, sizes = args.prompt_lengths, args.batch_sizes
    if max(sizes) > 1:
        require_batchable(loaded.model)
    # Prompts are cut from this text.
    tokens = encode_text(loaded.tokenizer, latency.sample_text(args.corpus))
    model_args = getattr(loaded.model, "args", None)
    positions = getattr(model_args, "max_position_embeddings", 0)
    if positions and max(lengths) + args.tokens > positions:
        raise UserError(
            f"prompts of {max(lengths)} and outputs of {args.tokens} tokens exceed the "
            f"model's maximum of {positions}",
            hint="reduce --prompt-lengths or --tokens",
        )
    decoders = _decoders(args, loaded)
    amounts = (lengths, sizes, args.tokens, args.repeats)
    plan = latency.BenchmarkPlan(*amounts, check_parity=args.check_parity)
    bandwidth = measure_memory_bandwidth()
    verify_cost = latency.measure_verify_cost(loaded.model, prompt_length=min(lengths))
    if not args.json:
        head = HEAD.format(bandwidth / 1e9, verify_cost)
        terminal.write_out(head + ROW.format(*COLUMNS) + "\n")
    rows = []
    for row in latency.run_benchmark(tokens, plan, decoders):
        if row["decoder"] == STANDARD:
            # A step reads the weights once for the whole batch.
            steps = row["decode_tokens_per_second"]["p50"] / row["batch_size"]
            read = steps * weight_bytes(loaded.model, loaded.config)
            row["bandwidth_share"] = read / bandwidth
            row["verify_cost"] = verify_cost
        rows.append(row)
        if not args.json:
            terminal.write_out(_cells(row) + "\n")
            if "parity" in row:
                terminal.write_out(f"{'':15}{parity_line(row['parity'])}\n")
    if args.json:
        terminal.write_json({args.model: rows}, indent=2)
    return 0


def _decoders(args: argparse.Namespace, loaded: "LoadedModel") -> "BenchmarkArms":
    """Standard decoding and the proposers to compare, by name."""
    from ..convert.importers import load_model
    from ..generation.generator import Generator
    from ..generation.speculative.draft_length import DraftLengthController
    from ..generation.speculative.factory import PROMPT_LOOKUP, proposer_factory
    from ..generation.speculative.prompt_lookup import PromptLookupProposer

    proposers = {PROMPT_LOOKUP: lambda _: PromptLookupProposer()}
    if args.draft_model and args.draft_model != PROMPT_LOOKUP:
        proposers[f"draft {Path(args.draft_model).name}"] = proposer_factory(
            args.draft_model,
            loaded,
            load_draft=partial(load_model, trust_remote_code=args.trust_remote_code),
        )

    def speculative(make_proposer):
        return lambda: Generator(
            loaded.model,
            loaded.tokenizer,
            make_proposer=make_proposer,
            draft_length=DraftLengthController(fixed=args.num_draft_tokens),
        )

    standard = {STANDARD: lambda: Generator(loaded.model, loaded.tokenizer)}
    return standard | {name: speculative(make) for name, make in proposers.items()}


def _cells(row: dict) -> str:
    def percentiles(name: str, digits: int = 0) -> str:
        return " / ".join(f"{value:,.{digits}f}" for value in row[name].values())

    def share(name: str) -> str:
        value = row.get(name)
        return "-" if value is None else f"{value:.0%}"

    return ROW.format(
        *(row[key] for key in ("prompt_tokens", "batch_size", "decoder")),
        percentiles("ttft_ms"),
        percentiles("prefill_tokens_per_second"),
        percentiles("decode_tokens_per_second", 1),
        share("bandwidth_share"),
        f"{row['peak_memory_gb']:.2f}",
        f"{row['speedup']:.2f}x",
        share("acceptance_rate"),
    )
