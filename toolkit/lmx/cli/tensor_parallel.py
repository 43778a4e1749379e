"""`--tensor-parallel`: one model in the processes that mlx.launch has started."""

import argparse
import signal
from typing import TYPE_CHECKING

from .options import refuse

if TYPE_CHECKING:
    from ..generation.engine import Engine
    from ..interfaces import Communicator
    from ..models.loader import LoadedModel

STUCK_SECONDS = 30.0
"""After which a process ends that has a SIGTERM and waits for rank 0."""


def add_tensor_parallel_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the number of processes."""
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="M",
        help="processes that hold the model together, each a part of every layer, or "
        "some layers (qwen3_next, bailing_hybrid): start M with mlx.launch -n M",
    )


def join_processes(args: argparse.Namespace, *unsupported: str) -> "Communicator":
    """Connect the processes.

    Args:
        unsupported: arguments that need the whole model in a process.

    Raises:
        UserError: an option is not supported, or there is another number of processes.
    """
    from .. import launcher
    from ..config.parallel import ParallelConfig
    from ..run.distributed import join
    from ..run.parallel_dims import require_process_count

    count = args.tensor_parallel
    faults = {"--tensor-parallel must be 1 or more": count < 1}
    for name in unsupported:
        fault = f"--{name.replace('_', '-')} does not work with --tensor-parallel"
        faults[fault] = count > 1 and getattr(args, name)
    refuse(faults)
    config = ParallelConfig(data=1, tensor=count)
    require_process_count(config, launcher.process_count())
    return join()


def load_part(
    args: argparse.Namespace, ranks: "Communicator", adapter: str | None = None
) -> "LoadedModel":
    """The model of the arguments, or this rank's part of it.

    Raises:
        UserError: it does not load, or the ranks have different ones.
    """
    from ..api.model import model_path
    from ..convert.importers import load_model
    from ..models.checkpoint import weights_digest

    loaded = load_model(
        model_path(args.model),
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        adapter=adapter,
        group=ranks,
    )
    if ranks.size > 1:
        digest, hint = weights_digest(loaded.path), "give all machines the same model"
        ranks.require_same(digest, "has another model", hint=hint)
    return loaded


def follow(engine: "Engine") -> int:
    """Follow rank 0 until it ends; returns the exit code."""
    from ..run.signals import exit_if_stuck, stop_requested

    # Rank 0 gets the signals too, and may still answer requests.
    with stop_requested(signal.SIGINT, signal.SIGTERM), exit_if_stuck(STUCK_SECONDS):
        engine.follow()
    return 0
