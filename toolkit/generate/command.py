"""`lmx generate`: a prompt in, streamed text on stdout, the timings on stderr."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from ..errors import INTERRUPTED, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx generate`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="model folder, run folder or Hub id")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="what to answer")
    prompt.add_argument("--prompt-file", metavar="FILE", help="- = standard input")
    add("--system", metavar="TEXT", help="system message of the chat")
    add("--max-tokens", type=int, default=256, metavar="N", help="default 256")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 = greedy")
    add("--top-p", type=float, default=1.0, metavar="P", help="nucleus; 1 = off")
    add("--top-k", type=int, default=0, metavar="K", help="0 = off")
    add("--min-p", type=float, default=0.0, metavar="P", help="0 = off")
    add("--seed", type=int, default=0, metavar="N", help="default 0")
    add("--raw", action="store_true", help="continue the text: no chat template")
    add("--json", action="store_true", help="print one JSON object at the end instead")
    add("--revision", metavar="R", help="branch, tag or commit of a Hub id")
    add("--trust-remote-code", action="store_true", help="run the model's own Python")


def run(args: argparse.Namespace) -> int:
    """Generate; the exit code is 0, or 130 when interrupted.

    Raises:
        UserError: no such model or file, an impossible setting.
    """
    text = _prompt(args)
    try:
        return _generate(args, text)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return INTERRUPTED
    except BrokenPipeError:  # as in `| head`: nobody reads on
        # What is still buffered would raise once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _prompt(args: argparse.Namespace) -> str:
    if args.raw and args.system is not None:
        raise UserError("--raw has no chat, so --system has no place in it")
    if args.max_tokens < 0:
        raise UserError(f"--max-tokens is {args.max_tokens}, but must be 0 or more")
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file == "-":
        return sys.stdin.read()
    try:
        return Path(args.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the prompt cannot be read: {error}", place=args.prompt_file
        ) from error


def _generate(args: argparse.Namespace, text: str) -> int:
    from .. import allocator, blas

    allocator.keep()
    blas.use()
    import mlx.core as mx

    from ..model.folder import served
    from ..model.load import load
    from .engine import Generator
    from .sampling import Sampling

    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    sampling = Sampling(**{name: getattr(args, name) for name in names})
    loaded = load(
        served(args.model),
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
    )
    generator = Generator(loaded.model, loaded.tokenizer)
    prompt = _encode(generator, args, text)
    options = {} if args.json else {"on_piece": _write}
    generation = generator.generate(
        prompt, max_tokens=args.max_tokens, sampling=sampling, **options
    )
    _report(generation, mx.get_peak_memory() / 1e9, as_json=args.json)
    return 0


def _encode(generator, args: argparse.Namespace, text: str) -> list[int]:
    if args.raw:
        return generator.encode_text(text)
    messages = [{"role": "user", "content": text}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    return generator.encode(messages)


def _write(piece) -> None:
    sys.stdout.write(piece.text)
    sys.stdout.flush()


def _report(generation, peak: float, *, as_json: bool) -> None:
    if as_json:
        facts = {**asdict(generation), "peak_memory_gb": peak}
        sys.stdout.write(json.dumps(facts, ensure_ascii=False) + "\n")
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    parts = [f"{generation.prompt_tokens} prompt tokens"]
    if generation.ttft_ms is not None:
        parts.append(f"first token after {generation.ttft_ms:.0f} ms")
    for name in ("prefill", "decode"):
        rate = getattr(generation, f"{name}_tokens_per_second")
        if rate is not None:
            parts.append(f"{name} {rate:.1f} tokens/s")
    parts.append(f"peak memory {peak:.2f} GB")
    sys.stderr.write(", ".join(parts) + "\n")
