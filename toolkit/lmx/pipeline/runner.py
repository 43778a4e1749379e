"""The tracker that a recipe names, open while its stages run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from .. import __version__, cpu
from ..config import yaml_io
from ..config.loader import LoadedRecipe
from ..convert.exporters import hub
from ..data.splits import Splits
from ..errors import Interrupted, UserError
from ..evaluation import lm_eval
from ..run.distributed import ProcessGroup, join
from ..run.html.page import NAME as REPORT
from ..run.launcher import backend
from ..run.logger import NullLogger, RunLogger
from ..run.run_dir import NullRunDir, RunDir
from ..run.trackers import TRACKERS, TrackerThread
from ..training import fsdp
from . import draft, evaluate, export, quantize, train
from .context import ModelArtifact, StageContext
from .plan import PlannedStage, RunPlan, difference


@contextmanager
def tracked(loaded: LoadedRecipe, logger: RunLogger) -> Iterator[None]:
    """Send the logger's rows to the recipe's tracker, if it names one."""
    if (config := loaded.recipe.tracker) is None:
        yield
        return
    start = partial(
        TRACKERS[config.type],
        config,
        folder=logger.folder,
        name=loaded.name,
        recipe=yaml_io.read(loaded.resolved).data,
    )
    logger.tracking = TrackerThread(start, logger.warning)
    code = 1
    try:
        yield
        code = 0
    finally:
        logger.tracking.finish(_summary(logger.folder / "report.json"), code)


def _summary(path: Path) -> dict[str, float]:
    """The figures of every model measured; none if nothing was."""
    models = json.loads(path.read_text())["models"] if path.exists() else {}
    return {
        f"{name}/{key}": value
        for name, figures in models.items()
        for key, value in figures.items()
        if isinstance(value, int | float)
    }


# --- from recipe.run: Run a plan: every stage in its folder, finished ones skipped, all of it resumable.

STAGES = {
    "train": train,
    "quantize": quantize,
    "draft": draft,
    "evaluate": evaluate,
    "export": export,
}


def run(
    loaded: LoadedRecipe,
    plan: RunPlan,
    *,
    restart: bool,
    ignore_limits: bool,
    quiet: bool,
    command: str,
) -> int:
    """Run every stage that is not done; returns the exit code.

    Args:
        command: what the user typed, to repeat after an interruption.

    Raises:
        UserError: a stage cannot do its work, or a gate is missed.
        Interrupted: stopped by the user, resumable.
    """
    from .resources import require_resources

    cpu.enable()
    ranks = join()
    with ranks.connection_errors():
        ranks.require_same(
            plan.recipe_hash,
            "runs another recipe",
            hint="give all machines the same file and the same arguments",
        )
        if any(getattr(step.config, "fsdp", False) for step in plan.steps):
            fsdp.require_fsdp_support(ranks)
        with ranks.collective_errors():
            if not ignore_limits:
                require_resources(loaded, plan)
            if ranks.is_first:
                _require_elsewhere(plan, ranks)
        with ranks.collective_errors():
            opened = _open(loaded, plan, command, restart, ranks)
    with opened as folder:
        logger = RunLogger(folder.path, quiet=quiet) if ranks.is_first else NullLogger()
        logger.info(f"lmx {__version__}: {loaded.name} -> {folder.path}")
        if ranks.size > 1:
            logger.info(
                f"{ranks.size} processes over {backend()}; every batch is cut in "
                f"{ranks.size}"
            )
        if folder.crash_note:
            logger.warning(folder.crash_note)
        try:
            tracking = tracked(loaded, logger) if ranks.is_first else nullcontext()
            with tracking, ranks.connection_errors():
                _run_stages(loaded, plan, folder, logger, ranks)
        except (Interrupted, KeyboardInterrupt):
            logger.warning(f"interrupted; to go on: {command}")
            folder.set_status("interrupted")
            raise
        except UserError as error:
            logger.debug(str(error))
            folder.set_status("failed")
            raise
        folder.set_status("done")
        logger.info(f"done: {folder.path / REPORT}")
    return 0


def _require_elsewhere(plan: RunPlan, ranks: ProcessGroup) -> None:
    """Refuse a run that the Hub or the harness would refuse at its end."""
    for step in plan.steps:
        if name := getattr(step.config, "hub_repo_id", None):
            hub.require_write_access(name, private=step.config.private)
        if tasks := getattr(step.config, "tasks", None):
            lm_eval.require(tasks)
            if ranks.size > 1:
                raise UserError(
                    "tasks are measured by one process, and this run has several",
                    hint="leave `tasks` out, and validate the model in a second run",
                )


def _open(
    loaded: LoadedRecipe,
    plan: RunPlan,
    command: str,
    restart: bool,
    ranks: ProcessGroup,
) -> RunDir | NullRunDir:
    if not ranks.is_first:
        return NullRunDir(plan.output)
    return RunDir.open(
        plan.output,
        name=loaded.name,
        command=command,
        recipe_text=loaded.text,
        resolved=loaded.resolved,
        recipe_hash=plan.recipe_hash,
        difference=difference,
        restart=restart,
    )


def _run_stages(
    loaded: LoadedRecipe,
    plan: RunPlan,
    folder: RunDir | NullRunDir,
    logger: RunLogger,
    ranks: ProcessGroup,
) -> None:
    artefact: ModelArtifact | None = None
    context = _context(loaded, folder, logger, ranks)
    for position, step in enumerate(plan.steps):
        with ranks.collective_errors():
            facts = folder.completed_stage(step.name, logger.warning)
            if facts is None:
                folder.discard_stages(
                    [later.name for later in plan.steps[position + 1 :]]
                )
                folder.start_stage(step.name)
        facts = ranks.broadcast_object(facts)
        if facts is not None:
            logger.info(f"stage {step.name}: done before")
        else:
            logger.stage = step.name
            logger.info(f"stage {step.name}")
            facts = _run_stage(step, replace(context, current=artefact), folder)
        artefact = _here(facts, context)


def _run_stage(
    step: PlannedStage, context: StageContext, folder: RunDir | NullRunDir
) -> dict:
    """Run a stage, in all processes or the first one alone; what it leaves, as JSON."""
    stage = STAGES[step.kind]
    ranks = context.ranks
    with ranks.collective_errors():
        current = context.current
        if current is None and context.base is not None:
            current = ModelArtifact(context.base, context.base)
        place = folder.stage_folder(step.name)
        context = replace(context, folder=place, current=current)
    if hasattr(stage, "TOGETHER"):
        artefact = stage.run(step.config, context)
    else:
        with ranks.collective_errors():
            artefact = stage.run(step.config, context) if ranks.is_first else None
    with ranks.collective_errors():
        if ranks.is_first:
            facts = artefact.to_json(folder.path)
            folder.complete_stage(step.name, facts, _own(artefact, folder.path))
    return ranks.broadcast_object(facts if ranks.is_first else None)


def _here(facts: dict, context: StageContext) -> ModelArtifact:
    """An artefact of the first process; the recipe's model has its own place here."""
    artefact = ModelArtifact.from_json(facts, context.output)
    if context.ranks.is_first or artefact.model.is_relative_to(context.output):
        return artefact
    return ModelArtifact(context.base, context.base, facts=artefact.facts)


def _context(
    loaded: LoadedRecipe,
    folder: RunDir | NullRunDir,
    logger: RunLogger,
    ranks: ProcessGroup,
) -> StageContext:
    recipe = loaded.recipe
    rows = Splits(
        recipe.data,
        find=lambda name: loaded.find(name) or Path(name),
        seed=recipe.seed,
        info=logger.info,
        warning=logger.warning,
    )
    return StageContext(
        folder=folder.path,
        output=folder.path,
        name=loaded.name,
        source=recipe.model,
        data=recipe.data,
        seed=recipe.seed,
        current=None,
        logger=logger,
        find=loaded.find,
        rows=rows,
        ranks=ranks,
    )


def _own(artefact: ModelArtifact, output: Path) -> list[Path]:
    """The artefact's folders that lie in the run folder, and so are ours to check."""
    folders = {artefact.model, artefact.reference, artefact.adapters, artefact.draft}
    folders = {*folders, *artefact.published} - {None}
    return sorted(path for path in folders if path.is_relative_to(output))
