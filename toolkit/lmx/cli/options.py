"""Options that several verbs have, and the refusal of those that do not fit."""

import argparse
from typing import TYPE_CHECKING, Any

from ..config.draft import MAX_DRAFT_TOKENS
from ..config.quant_spec import KV_CACHE_BITS, KV_POLICIES, MIN_KV_SIZE
from ..errors import UserError

if TYPE_CHECKING:
    from ..generation.generator import Generator
    from ..models.loader import LoadedModel


def add_draft_arguments(
    parser: argparse.ArgumentParser, *, check_parity: bool = True
) -> None:
    """Declare the arguments of speculative decoding."""
    add = parser.add_argument
    add(
        "--draft-model",
        metavar="DRAFT",
        help="speculative decoding with the same output: prompt-lookup (n-grams of "
        "this and earlier texts), mtp (the model's own multi-token-prediction head), "
        "a model folder or Hub id, or prompt-lookup+ one of these",
    )
    add(
        "--num-draft-tokens",
        type=int,
        metavar="N",
        help="draft tokens per step; absent = adapted to the measured speed-up",
    )
    if check_parity:
        about = "compare with standard greedy decoding and report mismatches"
        add("--check-parity", action="store_true", help=about)


def add_kv_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the KV cache."""
    add = parser.add_argument
    add(
        "--kv-bits",
        type=int,
        choices=KV_CACHE_BITS,
        help="quantize the KV cache; 16 = not. Default: the bits by layer that a "
        "quantize stage with kv_cache wrote, else 16",
    )
    add(
        "--max-kv-size",
        type=int,
        metavar="N",
        help="keep keys and values of at most N tokens of a request, in layers with "
        "full attention",
    )
    add(
        "--kv-policy",
        choices=KV_POLICIES,
        help="which: window (default) = the first 4 and the last ones; snapkv = those "
        "that the end of the prompt attends to most",
    )


def kv_argument_faults(args: argparse.Namespace) -> dict[str, bool]:
    """Messages about the arguments of `add_kv_arguments`, and whether they apply."""
    size = args.max_kv_size
    return {
        "--kv-policy needs --max-kv-size": size is None and args.kv_policy is not None,
        f"--max-kv-size must be {MIN_KV_SIZE} or more, got {size}": (
            size is not None and size < MIN_KV_SIZE
        ),
    }


def make_generator(
    args: argparse.Namespace, loaded: "LoadedModel", **options: Any
) -> "Generator":
    """The generator of `add_draft_arguments` and `add_kv_arguments`.

    Raises:
        UserError: the draft model does not load, or has another tokenizer.
    """
    from ..api import model
    from ..generation.kv_cache.eviction import kv_limit

    return model.make_generator(
        loaded,
        args.draft_model,
        args.num_draft_tokens,
        trust_remote_code=args.trust_remote_code,
        kv_bits=args.kv_bits,
        kv_limit=kv_limit(args.max_kv_size, args.kv_policy),
        **options,
    )


class OneValue(argparse.Action):
    """Stores the value of an option that is given once: a second one is no update."""

    def __call__(self, parser, namespace, value, option_string=None) -> None:
        """Store the value, or end with an error."""
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is given twice; lmx serve takes several")
        setattr(namespace, self.dest, value)


def refuse(faults: dict[str, Any]) -> None:
    """Raise a `UserError` with the first message whose value is true."""
    for message, is_fault in faults.items():
        if is_fault:
            raise UserError(message)


def draft_argument_faults(args: argparse.Namespace) -> dict[str, bool]:
    """Messages about the arguments of `add_draft_arguments`, and whether they apply."""
    number = args.num_draft_tokens
    needs_draft = number is not None or getattr(args, "check_parity", False)
    return {
        "--num-draft-tokens and --check-parity need --draft-model": (
            needs_draft and not args.draft_model
        ),
        f"--num-draft-tokens must be 1 to {MAX_DRAFT_TOKENS}, got {number}": (
            number is not None and not 1 <= number <= MAX_DRAFT_TOKENS
        ),
    }
