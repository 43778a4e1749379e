"""Run a plan: every stage in its folder, finished ones skipped, all of it resumable."""

import importlib
from dataclasses import replace
from pathlib import Path

from .. import __version__, allocator, blas
from ..data.sources import Splits
from ..errors import Interrupted, UserError
from ..run.folder import RunFolder
from ..run.report import Report
from ..stages.context import Artefact, Context
from .loader import Loaded
from .plan import Plan, difference
from .tracked import tracked


def run(
    loaded: Loaded, plan: Plan, *, fresh: bool, force: bool, quiet: bool, command: str
) -> int:
    """Run every stage that is not done; returns the exit code.

    Args:
        command: what the user typed, to repeat after an interruption.

    Raises:
        UserError: a stage cannot do its work, or a gate is missed.
        Interrupted: stopped by the user, resumable.
    """
    from .needs import require_room

    allocator.keep()
    blas.use()
    if not force:
        require_room(loaded, plan)
    opened = RunFolder.open(
        plan.output,
        name=loaded.name,
        recipe_text=loaded.text,
        resolved=loaded.resolved,
        recipe_hash=plan.recipe_hash,
        difference=difference,
        fresh=fresh,
    )
    with opened as folder:
        report = Report(folder.path, quiet=quiet)
        report.say(f"lmx {__version__}: {loaded.name} -> {folder.path}")
        if folder.died:
            report.warn(folder.died)
        try:
            with tracked(loaded, report):
                _run_stages(loaded, plan, folder, report)
        except (Interrupted, KeyboardInterrupt):
            folder.set_status("interrupted")
            report.warn(f"interrupted; to go on: {command}")
            raise
        except UserError as error:
            folder.set_status("failed")
            report.log(str(error))
            raise
        folder.set_status("done")
        report.say(f"done: {folder.path}")
    return 0


def _run_stages(loaded: Loaded, plan: Plan, folder: RunFolder, report: Report) -> None:
    artefact: Artefact | None = None
    context = _context(loaded, folder, report)
    for position, step in enumerate(plan.steps):
        facts = folder.finished(step.name, report.warn)
        if facts is not None:
            report.say(f"stage {step.name}: done before")
            artefact = Artefact.from_json(facts, folder.path)
            continue
        folder.forget([later.name for later in plan.steps[position + 1 :]])
        folder.enter(step.name)
        report.stage = step.name
        report.say(f"stage {step.name}")
        if artefact is None and context.base is not None:
            artefact = Artefact(context.base, context.base)
        stage = importlib.import_module(f"toolkit.stages.{step.kind}")
        place = folder.stage_folder(step.name)
        artefact = stage.run(
            step.config, replace(context, folder=place, current=artefact)
        )
        facts = artefact.to_json(folder.path)
        folder.finish(step.name, facts, _own(artefact, folder.path))


def _context(loaded: Loaded, folder: RunFolder, report: Report) -> Context:
    recipe = loaded.recipe
    rows = Splits(
        recipe.data,
        find=lambda name: loaded.find(name) or Path(name),
        seed=recipe.seed,
        say=report.say,
        warn=report.warn,
    )
    return Context(
        folder=folder.path,
        output=folder.path,
        name=loaded.name,
        source=recipe.model,
        data=recipe.data,
        seed=recipe.seed,
        current=None,
        report=report,
        find=loaded.find,
        rows=rows,
    )


def _own(artefact: Artefact, output: Path) -> list[Path]:
    """The artefact's folders that lie in the run folder, and so are ours to check."""
    folders = {artefact.model, artefact.reference, artefact.adapters} - {None}
    return sorted(path for path in folders if path.is_relative_to(output))
