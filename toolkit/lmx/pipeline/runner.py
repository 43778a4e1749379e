"""Run a plan: every stage in its own folder, completed stages skipped, resumable."""

import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from .. import cpu
from ..config import yaml_io
from ..config.loader import LoadedRecipe
from ..config.redaction import REDACTED
from ..config.schema import RecipeConfig
from ..data.splits import Splits
from ..errors import FAILED, USAGE, Interrupted, UserError
from ..files.atomic import FULL_HINT
from ..interfaces import Communicator, Logger
from ..launcher import backend
from ..models.checkpoint import weights_digest
from ..run.distributed import join
from ..run.html.page import NAME as PAGE
from ..run.logger import RunLogger
from ..run.manifest import StageInputs, changed_inputs
from ..run.parallel_dims import ParallelDims
from ..run.report import REPORT, read_report
from ..run.run_dir import NullRunDir, RunDir
from ..run.trackers import TRACKERS, TrackerThread, finish_all
from ..version import __version__
from .context import ModelArtifact, StageContext
from .dry_run import require_resources
from .extensions import Extensions
from .plan import RunPlan
from .stage import Stage

# Characters of a prompt in a command that a run shows.
LONGEST_PROMPT = 160


def run(
    loaded: LoadedRecipe,
    plan: RunPlan,
    *,
    restart: bool,
    ignore_limits: bool,
    quiet: bool,
    command: str,
    extensions: Extensions | None = None,
) -> None:
    """Run every stage that is not complete.

    Args:
        restart: set an earlier run aside instead of resuming it.
        ignore_limits: run even if memory or disk look too small.
        command: the user's command, which resumes the run after an interruption.
        extensions: what Python code adds; None = nothing.

    Raises:
        UserError: a stage cannot do its work, or a threshold is missed.
        Interrupted: stopped by the user or a callback, resumable.
    """
    extensions = extensions or Extensions()
    extensions.require(loaded.recipe)
    cpu.enable()
    ranks = join()
    with ranks.ends_together():
        # Refuse a run that cannot reach its end.
        ranks.require_same(
            [plan.recipe_hash, loaded.recipe.parallel.model_dump()],
            "runs another recipe",
            hint="give all machines the same file and the same arguments",
        )
        for planned in plan.stages:
            planned.stage.check_ranks(ranks)
        if not ignore_limits:
            require_resources(loaded, replace(plan, restart=restart))
        if ranks.is_first:
            for planned in plan.stages:
                planned.stage.remote_checks()
        parallel = ParallelDims.build(loaded.recipe.parallel, ranks)
        opened = _open(loaded, plan, command, restart, ranks)
        ranks.wait_for_all()
    with opened as run_dir:
        logger = RunLogger(run_dir.path, quiet=quiet) if ranks.is_first else Logger()
        logger.on_heartbeat = run_dir.write_page
        _log_start(loaded, run_dir, logger, ranks)
        try:
            tracking = tracked(loaded, logger) if ranks.is_first else nullcontext()
            with tracking, ranks.ends_together():
                context = make_context(
                    loaded, run_dir.path, logger, parallel, extensions
                )
                last = _run_stages(context, plan, run_dir)
        except (Interrupted, KeyboardInterrupt):
            logger.warning(f"interrupted; to resume: {command}")
            raise
        except UserError as error:
            logger.debug(str(error))
            raise
        except SystemExit as error:
            # An exit code of 0 would say that the run is done.
            [*_, last] = traceback.extract_tb(error.__traceback__)
            place = f"{last.filename}:{last.lineno}"
            text = f"the run was ended by sys.exit({error.code!r})"
            raise UserError(text, place=place, code=FAILED) from error
        run_dir.set_status("done")
        logger.info(f"done: {run_dir.path / PAGE}")
        for purpose, words in _next_commands(last, run_dir.path, loaded.recipe).items():
            logger.info(f"{purpose}: {words}")


def _next_commands(
    last: ModelArtifact, output: Path, recipe: RecipeConfig
) -> dict[str, str]:
    """By purpose, what to do with the run's new model; empty if it made none.

    The prompt is the first one that the recipe or the evaluation shows answers of.
    """
    model = last.result_in(output)
    if model is None and last.draft is None:
        return {}
    words = [str(model or last.model)]
    if last.draft:
        words += ["--draft-model", str(last.draft)]
    shown = [stage.train.sample_prompts for stage in recipe.stages if stage.train]
    samples = read_report(output / REPORT).get("samples", [])
    asked = (sample["prompt"] for sample in samples)
    shown.append([p for p in asked if "\n" not in p and len(p) <= LONGEST_PROMPT])
    prompt = next((shlex.quote(prompts[0]) for prompts in shown if prompts), '"..."')
    model_words = shlex.join(words)
    return {
        "try it": f"lmx generate {model_words} --prompt {prompt}",
        "serve it": f"lmx serve {model_words}",
    }


def _log_start(
    loaded: LoadedRecipe,
    run_dir: RunDir | NullRunDir,
    logger: RunLogger,
    ranks: Communicator,
) -> None:
    logger.info(f"lmx {__version__}: {loaded.name} -> {run_dir.path}")
    if ranks.size > 1:
        tensor = loaded.recipe.parallel.tensor
        share = f"each trains on 1/{ranks.size} of every batch"
        if tensor > 1:
            share = f"{tensor} hold a model together"
        logger.info(f"{ranks.size} processes over {backend()}; {share}")
    if loaded.secrets:
        logger.warning(
            f"{', '.join(loaded.secrets)}: this looks like a token or a password. "
            f"The run uses it; its files, trackers and model cards get {REDACTED} "
            "instead. Keep secrets in environment variables."
        )
    if run_dir.crash_note:
        logger.warning(run_dir.crash_note)
    if run_dir.change_note:
        logger.info(run_dir.change_note)


@contextmanager
def tracked(loaded: LoadedRecipe, logger: RunLogger) -> Iterator[None]:
    """Send the logger's metrics to the recipe's trackers."""
    for config in loaded.recipe.tracker:
        start = partial(
            TRACKERS[config.type].start,
            config,
            folder=logger.folder,
            name=loaded.name,
            recipe=yaml_io.read(loaded.resolved).data,
        )
        logger.trackers.append(TrackerThread(config.type, start, logger.warning))
    code = 1
    try:
        yield
        code = 0
    finally:
        summary = {
            f"{name}/{key}": value
            for name, metrics in _models(logger.folder).items()
            for key, value in metrics.items()
            if isinstance(value, int | float)
        }
        finish_all(logger.trackers, summary, code)


def _models(output: Path) -> dict[str, dict]:
    """The figures of every evaluated model; empty without a report."""
    return read_report(output / REPORT).get("models", {})


def _open(
    loaded: LoadedRecipe,
    plan: RunPlan,
    command: str,
    restart: bool,
    ranks: Communicator,
) -> RunDir | NullRunDir:
    if not ranks.is_first:
        return NullRunDir(plan.output)
    try:
        return RunDir.open(
            plan.output,
            loaded,
            plan.identities,
            plan.inputs,
            recipe_hash=plan.recipe_hash,
            command=command,
            restart=restart,
        )
    except UserError as error:
        # Nothing has run. A dry run says the same, but does not fill the disk.
        error.code = FAILED if error.hint == FULL_HINT else USAGE
        raise


def _run_stages(
    context: StageContext, plan: RunPlan, run_dir: RunDir | NullRunDir
) -> ModelArtifact:
    """Run the stages in order; returns the artifact of the last one.

    Raises:
        Interrupted: a callback stops the run before its end.
        UserError: another process that runs a stage has other models or files.
    """
    logger, ranks = context.logger, context.ranks
    callbacks = context.extensions.callbacks
    names = [planned.name for planned in plan.stages]
    for position, name in enumerate(names):
        with logger.heartbeat(), logger.activity(f"checking what stage {name} left"):
            record = run_dir.completed_stage(name, logger.warning)
        if record is None:
            run_dir.discard_stages(names[position + 1 :])
        record = ranks.broadcast_object(record)
        if record is not None:
            logger.info(f"stage {name}: already complete, skipping")
        else:
            logger.stage = name
            logger.info(f"stage {name}")
            stage = plan.stages[position].stage
            is_shared = stage.runs_on_all_ranks and ranks.size > 1
            with logger.heartbeat(), logger.activity("hashing models and data"):
                inputs = plan.inputs(name) if is_shared or ranks.is_first else {}
            if is_shared:
                _require_same_inputs(inputs, context)
            run_dir.start_stage(name, inputs)
            ranks.wait_for_all()
            with logger.heartbeat():
                record = _run_stage(stage, context, run_dir)
            callbacks.call("stage_end", stage=name, metrics=_models(context.output))
            is_stopped = ranks.broadcast_object(callbacks.is_stopped)
            if is_stopped and name != names[-1]:
                raise Interrupted(f"stopped after stage {name}")
        # Rank 0's artifact, with this machine's path of the recipe's model.
        is_base = record["model"] is None or record["reference"] is None
        base = context.base if is_base else None
        current = ModelArtifact.from_json(record, context.output, base)
        context = replace(context, current=current)
    return context.current


def _run_stage(
    stage: Stage, context: StageContext, run_dir: RunDir | NullRunDir
) -> dict:
    """Run a stage on all ranks or on rank 0; returns its artifact as JSON."""
    ranks = context.ranks
    current = context.current
    if current is None and context.base is not None:
        current = ModelArtifact(context.base, context.base)
    folder = run_dir.stage_folder(stage.name)
    context = replace(context, folder=folder, current=current)
    if stage.runs_on_all_ranks:
        artifact = stage.run(context)
    else:
        artifact = stage.run(context) if ranks.is_first else None
    record = None
    if ranks.is_first:
        record = artifact.to_json(run_dir.path)
        folders = artifact.folders_in(run_dir.path)
        with context.logger.activity("hashing the new files"):
            run_dir.complete_stage(stage.name, record, folders)
    return ranks.broadcast_object(record)


def _require_same_inputs(inputs: StageInputs, context: StageContext) -> None:
    ranks, current, models = context.ranks, context.current, {}
    for name in ("model", "reference") if current else ():
        folder = context.require_visible(getattr(current, name))
        models[f"current {name}"] = weights_digest(folder)
    inputs = inputs | {"models": inputs["models"] | models}
    if changed := changed_inputs(ranks.broadcast_object(inputs), inputs):
        names = " and another ".join(changed)
        raise UserError(
            f"process {ranks.rank} has another {names} than the first one",
            hint="give all machines the same files, or the same revision",
        )


def make_context(
    loaded: LoadedRecipe,
    output: Path,
    logger: RunLogger,
    parallel: ParallelDims,
    extensions: Extensions,
) -> StageContext:
    """The surroundings of the first stage.

    Args:
        output: the run directory.
    """
    recipe = loaded.recipe
    extensions.callbacks.state.path = output
    rows = Splits(
        recipe.data,
        find=lambda name: loaded.find(name) or Path(name),
        seed=recipe.seed,
        info=logger.info,
        warning=logger.warning,
    )
    return StageContext(
        folder=output,
        output=output,
        name=loaded.name,
        source=recipe.model,
        data=recipe.data,
        seed=recipe.seed,
        current=None,
        logger=logger,
        find=loaded.find,
        rows=rows,
        parallel=parallel,
        extensions=extensions,
    )
