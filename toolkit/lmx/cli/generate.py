"""The options of `lmx generate`, and the generator they ask for."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import INTERRUPTED, UserError

if TYPE_CHECKING:
    from ..generation.engine import Generator
    from ..generation.sampling import Sampling
    from ..models.loader import LoadedModel


KEPT = 4 << 30
"""Bytes of earlier turns of a chat that are kept, to go on from them."""
SAMPLING = {
    "temperature": (float, 0.0, "0 = greedy (the default)"),
    "top-p": (float, 1.0, "nucleus; 1 = off"),
    "top-k": (int, 0, "0 = off"),
    "min-p": (float, 0.0, "0 = off"),
    "repetition-penalty": (float, 1.0, "divides logits of what was said; 1 = off"),
    "presence-penalty": (float, 0.0, "is subtracted from them; 0 = off"),
    "frequency-penalty": (float, 0.0, "the same, as often as it was said; 0 = off"),
    "seed": (int, 0, "default 0"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx generate`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="model folder, run folder or Hub id")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", metavar="TEXT", help="what to answer")
    asked.add_argument("--prompt-file", metavar="FILE", help="- = standard input")
    asked.add_argument(
        "--chat", action="store_true", help="a turn for every line of standard input"
    )
    asked.add_argument(
        "--input-file",
        metavar="FILE",
        help='JSONL rows {"prompt": ...} or {"messages": ...}, answered together; '
        "max_tokens, temperature and seed may stand in a row",
    )
    add("--system", metavar="TEXT", help="system message of the chat")
    add("--max-tokens", type=int, default=256, metavar="N", help="default 256")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the answer")
    for name, (kind, default, about) in SAMPLING.items():
        add(f"--{name}", type=kind, default=default, metavar="X", help=about)
    add(
        "--ignore-chat-template",
        action="store_true",
        help="continue the text: no chat template",
    )
    add(
        "--adapter-path",
        metavar="FOLDER",
        help="LoRA or DoRA adapter, mlx-lm's or peft's",
    )
    add_draft(parser)
    add("--kv-bits", type=int, choices=(4, 8), help="keep keys and values quantized")
    add(
        "--quantized-kv-start",
        type=int,
        default=0,
        metavar="N",
        help="from N tokens on",
    )
    add(
        "--save-prompt-cache",
        metavar="FOLDER",
        help="keep what was read, for another day",
    )
    add("--prompt-cache-file", metavar="FOLDER", help="go on from there")
    add("--json", action="store_true", help="print one JSON object at the end instead")
    add("--revision", metavar="R", help="branch, tag or commit of a Hub id")
    add("--trust-remote-code", action="store_true", help="run the model's own Python")


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of speculative decoding."""
    add = parser.add_argument
    add(
        "--draft-model",
        metavar="DRAFT",
        help="guess ahead and verify, which changes no text: lookup (what followed "
        "the same words before), self (fewer blocks of the model), a model folder or "
        "Hub id, or lookup+ one of these",
    )
    add(
        "--num-draft-tokens",
        type=int,
        metavar="N",
        help="always guess N tokens; absent = as many as pay, by measurement",
    )
    add(
        "--check-parity",
        action="store_true",
        help="decode plainly along the answer and tell which tokens rounding flipped",
    )
    add(
        "--sequential-verify",
        action="store_true",
        help="verify guesses in passes of one token: no flips, and no speed-up",
    )


def check_options(args: argparse.Namespace) -> None:
    """Refuse what does not go together.

    Raises:
        UserError: naming the options.
    """
    sessions = args.save_prompt_cache or args.prompt_cache_file
    greedy = args.temperature == 0
    faults = {
        "--ignore-chat-template has no chat, so --system has no place in it": args.ignore_chat_template
        and args.system is not None,
        "--ignore-chat-template has no chat, so --chat has no place beside it": args.ignore_chat_template
        and args.chat,
        f"--max-tokens is {args.max_tokens}, but must be 0 or more": args.max_tokens
        < 0,
        "--stop is empty": not all(args.stop),
        f"--quantized-kv-start is {args.quantized_kv_start}, but must be 0 or more": args.quantized_kv_start
        < 0,
        "--quantized-kv-start needs --kv-bits": args.quantized_kv_start
        and not args.kv_bits,
        "--input-file decodes many rows at once: no --draft-model, --kv-bits or session "
        "with it": args.input_file and (args.draft_model or args.kv_bits or sessions),
        "--check-parity compares greedy text: no --temperature with it": (
            args.check_parity and not greedy
        ),
        **draft_faults(args),
    }
    for fault, holds in faults.items():
        if holds:
            raise UserError(fault)


def draft_faults(args: argparse.Namespace) -> dict[str, bool]:
    """What is wrong with the arguments of `add_draft`, and whether it is."""
    number = args.num_draft_tokens
    alone = number is not None or args.check_parity or args.sequential_verify
    return {
        "--num-draft-tokens, --check-parity and --sequential-verify need --draft-model": (
            alone and not args.draft_model
        ),
        f"--num-draft-tokens is {number}, but must be 1 or more": (
            number is not None and number < 1
        ),
    }


def sampling_from_args(args: argparse.Namespace) -> "Sampling":
    """How tokens are chosen.

    Raises:
        UserError: an impossible setting.
    """
    from ..generation.sampling import Sampling

    names = (name.replace("-", "_") for name in SAMPLING)
    return Sampling(**{name: getattr(args, name) for name in names})


def open_generator(args: argparse.Namespace, loaded: "LoadedModel") -> "Generator":
    """The generator, which keeps what it reads where a later turn may want it."""
    from ..generation.engine import Generator
    from ..generation.prefix_cache import PrefixCache

    keeps = args.chat or args.save_prompt_cache or args.prompt_cache_file
    return Generator(
        loaded.model,
        loaded.tokenizer,
        prefix_cache=PrefixCache(KEPT) if keeps else None,
        sequential_verify=args.sequential_verify,
        kv_bits=args.kv_bits,
        quantized_kv_start=args.quantized_kv_start,
    )


# --- from generate.command: `lmx generate`: a prompt in, streamed text on stdout, the timings on stderr.


__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Generate; the exit code is 0, or 130 when interrupted.

    Raises:
        UserError: no such model or file, an impossible setting.
    """
    check_options(args)
    text = _text(args)
    try:
        return _run(args, text)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return INTERRUPTED
    except BrokenPipeError:  # as in `| head`: nobody reads on
        # What is still buffered would raise once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _text(args: argparse.Namespace) -> str:
    """The prompt, or the rows; a chat has neither yet."""
    file = args.input_file or args.prompt_file
    if not file:
        return args.prompt or ""
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the prompt cannot be read: {error}", place=file) from error


def _run(args: argparse.Namespace, text: str) -> int:
    from .. import cpu

    cpu.enable()
    from ..convert.importers import load_model
    from ..models.checkpoint import model_folder
    from . import batch_file
    from .interactive import InteractiveSession, print_json

    sampling = sampling_from_args(args)
    parsed = (
        batch_file.parse_requests(text, place=args.input_file)
        if args.input_file
        else []
    )
    loaded = load_model(
        model_folder(args.model),
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        adapter=args.adapter_path,
    )
    generator = open_generator(args, loaded)
    asked = {"max_tokens": args.max_tokens, "sampling": sampling, "stop": args.stop}
    if args.input_file:
        asked |= {"system": args.system, "raw": args.ignore_chat_template}
        for found in batch_file.generate_requests(generator, parsed, **asked):
            print_json(found)
        return 0
    talk = InteractiveSession(args, loaded, generator, asked)
    if args.chat:
        for line in _lines():
            talk.info(line)
    else:
        talk.info(text)
    talk.save()
    return 0


def _lines():
    """Lines of standard input up to /exit; on a terminal they are asked for."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        if line.strip():
            yield line.rstrip("\n")
