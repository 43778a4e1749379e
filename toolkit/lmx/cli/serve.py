"""`lmx serve`: an OpenAI endpoint on the engine."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .options import (
    add_draft_arguments,
    add_kv_arguments,
    draft_argument_faults,
    kv_argument_faults,
    make_generator,
    refuse,
)
from .tensor_parallel import (
    add_tensor_parallel_argument,
    follow,
    join_processes,
    load_part,
)

if TYPE_CHECKING:
    from ..generation.kv_cache.prefix_disk import PrefixDisk
    from ..interfaces import Communicator
    from ..models.loader import LoadedModel
    from ..serving.engine_thread import ServedModel

API_KEY = "LMX_API_KEY"


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx serve`."""
    add, switch = parser.add_argument, {"action": "store_true"}
    add("model", metavar="MODEL", help="model folder, run directory or Hub id")
    add("--host", default="127.0.0.1", help="default 127.0.0.1: this machine only")
    add("--port", type=int, default=8080, metavar="N", help="default 8080; 0 = free")
    add("--served-model-name", metavar="NAME", help="default: MODEL")
    key = f"what clients must send; or the environment variable {API_KEY}"
    add("--api-key", metavar="KEY", help=key)
    add(
        "--adapter",
        action="append",
        type=_adapter,
        default=[],
        metavar="NAME=FOLDER",
        help="a LoRA adapter that requests name as their model; may be repeated",
    )
    about = "let clients load adapters from this machine's disk, and drop them"
    add("--allow-adapter-loading", **switch, help=about)
    add_draft_arguments(parser, check_parity=False)
    add_tensor_parallel_argument(parser)
    add_kv_arguments(parser)
    add(
        "--kv-memory",
        type=float,
        metavar="GB",
        help="for keys and values of running requests; default: what is free",
    )
    add(
        "--prefix-cache",
        type=float,
        metavar="GB",
        help="for prefixes that requests share; default: an eighth of free memory",
    )
    about = "keep prefixes in this folder, also when the server ends; it holds prompts"
    add("--prefix-cache-dir", metavar="DIR", help=about)
    about = "for all prefixes in that folder; default 20"
    add("--prefix-cache-disk", type=float, metavar="GB", help=about)
    about = "requests decoded together; default 32"
    add("--max-batch-size", type=int, default=32, metavar="N", help=about)
    about = "completions that run or wait, more get status 429; default 256"
    add("--max-requests", type=int, default=256, metavar="N", help=about)
    about = "of completions whose requests have no limit; default 4096"
    add("--max-tokens", type=int, default=4096, metavar="N", help=about)
    about = "of chains of thought at most; requests may name another number"
    add("--thinking-budget", type=int, metavar="N", help=about)
    about = "seconds that a request may take; default 600"
    add("--timeout", type=float, default=600.0, metavar="S", help=about)
    add(
        "--system-messages",
        choices=("merge", "strict"),
        default="merge",
        help="merge those that the chat template does not take where they are, as in "
        "training; strict = refuse them. Default merge",
    )
    about = "MB of a request; default 8"
    add("--max-body", type=float, default=8.0, metavar="MB", help=about)
    add(
        "--allowed-origins",
        action="append",
        default=[],
        metavar="URL",
        help="a web page that may ask this server (CORS); default: none",
    )
    add("--log-requests", **switch, help="log bodies and answers, not only counts")
    add("--revision", metavar="R", help="branch, tag or commit of a Hub id")
    add("--trust-remote-code", **switch, help="run the model's own Python")


def _adapter(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        message = f"expected NAME=FOLDER, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return name, path


def serve(args: argparse.Namespace) -> int:
    """Serve; the exit code is 0 after a signal, 1 if the engine failed.

    Raises:
        UserError: the model does not load, the address is not free, or the extra
            `serve` is not installed.
    """
    disk = args.prefix_cache_disk
    refuse(
        {
            **{
                f"--{name.replace('_', '-')} must be 1 or more": not getattr(args, name)
                >= 1
                for name in ("max_batch_size", "max_requests", "max_tokens", "timeout")
            },
            "--thinking-budget must be 0 or more": (args.thinking_budget or 0) < 0,
            "--max-body must be more than 0": not 0 < args.max_body < 1e9,
            "--kv-memory must be more than 0": args.kv_memory is not None
            and not 0 < args.kv_memory < 1e9,
            "--prefix-cache must be 0 or more": not 0 <= (args.prefix_cache or 0) < 1e9,
            "--prefix-cache-disk must be more than 0": not 0
            < (1 if disk is None else disk)
            < 1e9,
            "--prefix-cache-disk needs --prefix-cache-dir": disk is not None
            and not args.prefix_cache_dir,
            # As of a variable that is not set: the server would be open to everyone.
            "--api-key is empty": args.api_key == "",
            **draft_argument_faults(args),
            **kv_argument_faults(args),
        }
    )
    try:
        from ..serving.app import HTTPSettings
        from ..serving.server import ModelServer
        from ..serving.service import ServiceSettings
    except ModuleNotFoundError as error:
        from ..installation import install_command

        message, hint = f"{error.name} is not installed", install_command("serve")
        raise UserError(message, hint=hint) from error
    ranks = join_processes(args, "adapter", "allow_adapter_loading", "prefix_cache_dir")
    if not ranks.is_first:
        with ranks.ends_together():
            return follow(_load(args, ranks).generator.engine)
    server = ModelServer(
        lambda: _load(args, ranks),
        host=args.host,
        port=args.port,
        service=ServiceSettings(
            model=args.served_model_name or args.model,
            max_tokens=args.max_tokens,
            max_requests=args.max_requests,
            timeout=args.timeout,
            system_messages=args.system_messages,
            thinking_budget=args.thinking_budget,
        ),
        http=HTTPSettings(
            api_key=args.api_key or os.environ.get(API_KEY) or None,
            max_body=int(args.max_body * 1e6),
            allowed_origins=tuple(args.allowed_origins),
            adapter_loading=args.allow_adapter_loading,
            log_requests=args.log_requests,
        ),
    )
    with ranks.ends_together():
        return server.run()


def _load(args: argparse.Namespace, ranks: "Communicator") -> "ServedModel":
    """The model, on the thread that calls it; for other ranks, what follows rank 0."""
    from ..convert.importers import load_model
    from ..generation.kv_cache.prefix import PrefixCache
    from ..generation.sampling import Sampling, sampling_defaults
    from ..generation.sequence import GenerationRequest
    from ..serving.engine_thread import ServedModel

    loaded = load_part(args, ranks)
    memory, prefixes = args.kv_memory, args.prefix_cache
    disk = None
    if args.prefix_cache_dir:
        disk = _prefix_disk(args, loaded, lambda: generator.engine.new_cache().kinds)
    max_bytes = None if prefixes is None else int(prefixes * 1e9)
    generator = make_generator(
        args,
        loaded,
        ranks=ranks,
        prefix_cache=PrefixCache(max_bytes, disk),
        max_batch_size=args.max_batch_size,
        kv_memory=None if memory is None else int(memory * 1e9),
    )
    # What the model cannot have is refused now, not with every request.
    generator.engine.new_cache()

    def load_adapter(path: str) -> Any:
        options = {"lazy": True, "trust_remote_code": args.trust_remote_code}
        return load_model(loaded.path, adapter=path, **options).model

    if ranks.is_first:
        # Compile what the first requests need. Predictions that are NaN are refused.
        requests = [GenerationRequest([0] * n, 8, Sampling(1.0)) for n in (4, 40, 12)]
        for _ in generator.generate_all(requests):
            pass
    for name, path in args.adapter:
        generator.engine.adapters.add(name, load_adapter(path))
    sampling = sampling_defaults(loaded.path)
    return ServedModel(generator, sampling, load_adapter)


def _prefix_disk(
    args: argparse.Namespace, loaded: "LoadedModel", kinds: Callable[[], list[str]]
) -> "PrefixDisk":
    """The folder of `--prefix-cache-dir`.

    Args:
        kinds: of the caches of the generator, which is made later.
    """
    from ..files.hashes import key_of
    from ..generation.kv_cache.prefix_disk import PrefixDisk
    from ..models.checkpoint import weights_digest
    from ..models.dtypes import stored_dtype
    from ..models.lora.multi_lora import BASE, multi_lora
    from ..run import terminal

    facts = [weights_digest(loaded.path), str(stored_dtype(loaded.model))]
    adapters = multi_lora(loaded.model)

    def model_hash(adapter: int) -> str:
        own = adapters.hashes[adapter] if adapter != BASE else None
        return key_of([*facts, kinds(), own])

    folder = Path(os.path.expanduser(args.prefix_cache_dir))
    max_bytes = int((args.prefix_cache_disk or 20) * 1e9)
    disk = PrefixDisk(
        folder, max_bytes, model_hash, lambda text: terminal.write_err(f"{text}\n")
    )
    size = f"{disk.nbytes / 1e9:.2f} GB"
    terminal.write_err(f"prefixes of earlier processes: {size} in {folder}\n")
    return disk
