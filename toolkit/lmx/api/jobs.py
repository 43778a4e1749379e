"""`lmx.train`, and `lmx.quantize`, `lmx.make_draft` and `lmx.export` for one stage."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import Interrupted, UserError
from ..files.atomic import MANIFEST
from ..pipeline import runner
from ..pipeline.extensions import Extensions, Loss
from ..run.callbacks import Callback, CallbackList
from .arguments import Integer, Keys, PathLike, checked
from .functions import Metrics, checked_loss, checked_metric, python_block
from .model import Model, ModelLike, model_path
from .recipe import Overrides, RecipeLike, as_recipe
from .run import Run, open_run

Data = PathLike | Sequence[str] | Keys


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
    """Run all stages of a recipe, as `lmx-train` does, to the same bytes.

    The same call skips completed stages and resumes an interrupted run.

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
        KeyboardInterrupt: Ctrl-C, after a checkpoint was saved. SIGTERM is left to the
            program.
    """
    block = python_block(loss, metrics)
    resolved = as_recipe(recipe, overrides, output, python=block)
    functions = {name: checked_metric(f, name) for name, f in (metrics or {}).items()}
    used = checked_loss(loss) if loss else None
    extensions = Extensions(CallbackList(callbacks), used, functions, allow_python)
    loaded, output = resolved.loaded, resolved.output
    # What resumes the run: a command, or the same call if it needs Python.
    words = [str(output / "recipe.yaml"), f"output={output}"]
    if loaded.path:
        words = [str(loaded.path), *loaded.overrides]
    command = shlex.join(["lmx-train", *words])
    if resolved.config.python:
        command = "the same call of lmx.train"
    try:
        runner.run(
            loaded,
            resolved.plan,
            **{"restart": restart, "ignore_limits": ignore_limits, "quiet": quiet},
            command=command,
            extensions=extensions,
        )
    except Interrupted as stop:
        if not extensions.callbacks.is_stopped:
            raise KeyboardInterrupt(str(stop)) from stop
    return open_run(output)


@checked
def quantize(
    model: Model | ModelLike,
    *,
    data: Data | None = None,
    output: PathLike | None = None,
    seed: Integer = 0,
    restart: bool = False,
    ignore_limits: bool = False,
    quiet: bool = False,
    **keys: Any,
) -> Run:
    """Quantize a model after training, measure it and export it.

    `restart`, `ignore_limits` and `quiet` are those of `lmx.train`.

    Args:
        model: a folder or GGUF file, a Hub id, a `Run`, or a `Model`.
        data: calibration data, of which a part is held out for the measurement: a
            file, a Hub id, a list of them, or a `data` block; None = built-in text.
        output: the run directory; None = exports/ and the model's name with a hash of
            all settings, so that the same call finds its result again.
        seed: as in a recipe.
        keys: those of a quantize stage: method ("rtn", "gptq", "awq"), bits,
            group_size, ... (docs/recipes.md). Without a method, it is "gptq" with the
            effort "fast".

    Returns:
        The run; `model_path` is the quantized model.

    Raises:
        ConfigErrors: all errors of the keys.
        UserError: the model cannot be quantized.
    """
    block = data_block(data, "train")
    stages = quantize_stages(keys, block)
    return train(
        _recipe(model, block, seed, stages),
        output=output,
        restart=restart,
        ignore_limits=ignore_limits,
        quiet=quiet,
    )


def quantize_stages(keys: Keys, data: dict[str, Any]) -> list[dict[str, Any]]:
    """The stages of a quantization that is measured.

    Args:
        keys: of the quantize stage.
        data: the block of the recipe; without examples it gets built-in ones.
    """
    if "method" not in keys:
        keys = {"method": "gptq", "effort": "fast", **keys}
    if not (data.get("train") or data.get("valid")):
        data["valid"] = "builtin:stdlib"
    return [{"quantize": keys}, {"evaluate": {}}, {"export": {}}]


@checked
def make_draft(
    model: Model | ModelLike,
    data: Data,
    *,
    output: PathLike | None = None,
    seed: Integer = 0,
    restart: bool = False,
    ignore_limits: bool = False,
    quiet: bool = False,
    **keys: Any,
) -> Run:
    """Train a draft model for speculative decoding of a model.

    The arguments after `data` are those of `quantize`, but for the keys.

    Args:
        model: as for `quantize`.
        data: prompts like those that the model will get, as for `quantize`.
        keys: those of a draft stage: architecture, steps, draft_model, ...
            (docs/recipes.md).

    Returns:
        The run; `draft_path` is the draft model, for `lmx.load(model, draft=...)`.

    Raises:
        ConfigErrors: all errors of the keys.
        UserError: the draft model cannot be trained, or misses a threshold.
    """
    return train(
        _recipe(model, data, seed, [{"draft": keys}]),
        output=output,
        restart=restart,
        ignore_limits=ignore_limits,
        quiet=quiet,
    )


@checked
def export(
    model: Model | ModelLike,
    formats: Sequence[str] = ("mlx",),
    *,
    output: PathLike | None = None,
    restart: bool = False,
    ignore_limits: bool = False,
    quiet: bool = False,
    **keys: Any,
) -> Run:
    """Write a model in the formats of other programs, reloaded and compared.

    `output`, `restart`, `ignore_limits` and `quiet` are those of `quantize`.

    Args:
        model: as for `quantize`.
        formats: "mlx", "hf" (transformers), "gguf" (llama.cpp), and "peft", the
            adapter that the `Run` trained, or that the `Model` was loaded with.
        keys: further keys of an export stage: hub_repo_id, private, license, and
            adapter_path, the adapter that "peft" exports; draft_model, the drafter or
            draft model that "gguf" exports beside the model.

    Returns:
        The run; its folder has model/, hf/, gguf/ and peft/.

    Raises:
        ConfigErrors: an unknown format, one that this architecture does not have, or
            "peft" without an adapter.
        UserError: the export fails.
    """
    if "peft" in formats and (adapter := _adapter(model)):
        keys = {"adapter_path": adapter} | keys
        if isinstance(model, Model) and [*formats] == ["peft"]:
            # Without the weights, the adapter need not be in their files.
            model = model.path
    stages = [{"export": {"formats": list(formats), **keys}}]
    return train(
        _recipe(model, None, 0, stages),
        output=output,
        restart=restart,
        ignore_limits=ignore_limits,
        quiet=quiet,
    )


def _adapter(model: Model | ModelLike) -> Path | None:
    """The trained adapter of a model; None without one."""
    if isinstance(model, Model):
        return model.adapter
    if isinstance(model, Run):
        return model.adapter_path
    is_run = os.path.isfile(Path(os.path.expanduser(model)) / MANIFEST)
    return Run(model).adapter_path if is_run else None


def _recipe(
    model: Model | ModelLike, data: Data | None, seed: int, stages: list[dict[str, Any]]
) -> dict[str, Any]:
    """A recipe of these stages.

    Raises:
        UserError: the model has an adapter, which is not in its files.
    """
    if isinstance(model, Model) and model.adapter:
        raise UserError(
            "the files of this model do not have its adapter",
            place=str(model.path),
            hint="fuse it first: mlx_lm.fuse, or train it in the same recipe",
        )
    block = data_block(data, "train")
    return {"model": model_path(model), "data": block, "seed": seed, "stages": stages}


def data_block(data: Data | None, split: str) -> dict[str, Any]:
    """The `data` block of a recipe with a dataset as its split."""
    if data is None:
        return {}
    if isinstance(data, Mapping):
        return dict(data)
    return {split: os.fspath(data) if isinstance(data, os.PathLike) else data}
