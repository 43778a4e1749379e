"""`lmx.train`: run a recipe."""

import shlex
from collections.abc import Sequence
from typing import Any

from ..errors import Interrupted
from ..pipeline import runner
from ..pipeline.extensions import Extensions, Loss
from ..run.callbacks import Callback, CallbackList
from .arguments import PathLike, checked
from .functions import Metrics, checked_loss, checked_metric, python_block
from .recipe import Overrides, Recipe, RecipeLike, as_recipe
from .run import Run, open_run


@checked
def train(
    recipe: RecipeLike,
    *,
    overrides: Overrides | None = None,
    output: PathLike | None = None,
    callbacks: Sequence[Callback] = (),
    loss: Loss | None = None,
    metrics: Metrics | None = None,
    restart: bool = False,
    ignore_limits: bool = False,
    allow_python: bool = False,
    quiet: bool = False,
) -> Run:
    """Run all stages of a recipe, as `lmx-train` does.

    The same call skips completed stages and resumes an interrupted run. The models have
    the same bytes as those of `lmx-train` with the same recipe.

    Args:
        recipe: a file, the name of a bundled recipe, a dict, or a `Recipe`.
        overrides: values by dotted key, such as {"stages.train.steps": 50}.
        output: the run directory.
        callbacks: see `lmx.Callback`.
        loss: the loss of train stages, from logits [..., V], targets int [...] and mask
            bool [...] to a scalar: the sum over the positions where the mask is True.
            lmx divides it by their number. It may be called for a part of a batch.
        metrics: functions by name from a `lmx.Model` and the validation examples, as
            dicts, to a number. Evaluate stages report them of every model.
        restart: move an earlier run of the folder aside and start over.
        ignore_limits: run even if the estimate exceeds memory or disk.
        allow_python: run the Python files that the recipe names as rewards.
        quiet: print only warnings and tables.

    Returns:
        The run. Its status is "done", or "interrupted" if a callback stopped it; the
        same call without that callback resumes it.

    Raises:
        ConfigErrors: all errors of the recipe; nothing was run.
        UserError: a stage failed, or a threshold was missed (its code is 1), or the run
            does not fit (3).
        KeyboardInterrupt: Ctrl-C or SIGTERM, after a checkpoint was saved.
    """
    block = python_block(loss, metrics)
    resolved = as_recipe(recipe, overrides, output, python=block)
    extensions = Extensions(
        CallbackList(callbacks),
        checked_loss(loss) if loss else None,
        {name: checked_metric(f, name) for name, f in (metrics or {}).items()},
        allow_python,
    )
    return run_recipe(
        resolved,
        extensions,
        command=_command(resolved),
        restart=restart,
        ignore_limits=ignore_limits,
        quiet=quiet,
    )


def run_recipe(recipe: Recipe, extensions: Extensions, **options: Any) -> Run:
    """Run a recipe.

    Args:
        options: those of `runner.run`.

    Raises:
        UserError, KeyboardInterrupt: as `train`.
    """
    try:
        runner.run(recipe.loaded, recipe.plan, extensions=extensions, **options)
    except Interrupted as stop:
        if not extensions.callbacks.is_stopped:
            raise KeyboardInterrupt(str(stop)) from stop
    return open_run(recipe.output)


def _command(recipe: Recipe) -> str:
    """What resumes the run: a command, or the same call if it needs Python."""
    loaded = recipe.loaded
    if recipe.config.python:
        return "the same call of lmx.train"
    if loaded.path:
        return shlex.join(["lmx-train", str(loaded.path), *loaded.overrides])
    file = recipe.output / "recipe.yaml"
    return shlex.join(["lmx-train", str(file), f"output={recipe.output}"])
