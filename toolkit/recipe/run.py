"""Run a plan: every stage in its folder, finished ones skipped, all of it resumable."""

import importlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from .. import __version__, allocator, blas
from ..data.sources import Splits
from ..errors import Interrupted, UserError
from ..export import hub
from ..measure import harness
from ..run.folder import RunFolder
from ..run.guest import GuestFolder, SilentReport
from ..run.launcher import backend
from ..run.page.write import NAME as REPORT
from ..run.ranks import Ranks, join
from ..run.report import Report
from ..stages.context import Artefact, Context
from ..train import shards
from .loader import Loaded
from .plan import Plan, Step, difference
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
    ranks = join()
    blas.use()
    with ranks.linked():
        ranks.require_same(
            plan.recipe_hash,
            "runs another recipe",
            hint="give all machines the same file and the same arguments",
        )
        if any(getattr(step.config, "shard", False) for step in plan.steps):
            shards.require(ranks)
        with ranks.agreed():
            if not force:
                require_room(loaded, plan)
            if ranks.is_first:
                _require_elsewhere(plan, ranks)
        with ranks.agreed():
            opened = _open(loaded, plan, command, fresh, ranks)
    with opened as folder:
        report = Report(folder.path, quiet=quiet) if ranks.is_first else SilentReport()
        report.say(f"lmx {__version__}: {loaded.name} -> {folder.path}")
        if ranks.size > 1:
            report.say(
                f"{ranks.size} processes over {backend()}; every batch is cut in "
                f"{ranks.size}"
            )
        if folder.died:
            report.warn(folder.died)
        try:
            tracking = tracked(loaded, report) if ranks.is_first else nullcontext()
            with tracking, ranks.linked():
                _run_stages(loaded, plan, folder, report, ranks)
        except (Interrupted, KeyboardInterrupt):
            report.warn(f"interrupted; to go on: {command}")
            folder.set_status("interrupted")
            raise
        except UserError as error:
            report.log(str(error))
            folder.set_status("failed")
            raise
        folder.set_status("done")
        report.say(f"done: {folder.path / REPORT}")
    return 0


def _require_elsewhere(plan: Plan, ranks: Ranks) -> None:
    """Refuse a run that the Hub or the harness would refuse at its end."""
    for step in plan.steps:
        if name := getattr(step.config, "push_to", None):
            hub.require_right(name, private=step.config.private)
        if tasks := getattr(step.config, "tasks", None):
            harness.require(tasks)
            if ranks.size > 1:
                raise UserError(
                    "tasks are measured by one process, and this run has several",
                    hint="leave `tasks` out, and validate the model in a second run",
                )


def _open(
    loaded: Loaded, plan: Plan, command: str, fresh: bool, ranks: Ranks
) -> RunFolder | GuestFolder:
    if not ranks.is_first:
        return GuestFolder(plan.output)
    return RunFolder.open(
        plan.output,
        name=loaded.name,
        command=command,
        recipe_text=loaded.text,
        resolved=loaded.resolved,
        recipe_hash=plan.recipe_hash,
        difference=difference,
        fresh=fresh,
    )


def _run_stages(
    loaded: Loaded,
    plan: Plan,
    folder: RunFolder | GuestFolder,
    report: Report,
    ranks: Ranks,
) -> None:
    artefact: Artefact | None = None
    context = _context(loaded, folder, report, ranks)
    for position, step in enumerate(plan.steps):
        with ranks.agreed():
            facts = folder.finished(step.name, report.warn)
            if facts is None:
                folder.forget([later.name for later in plan.steps[position + 1 :]])
                folder.enter(step.name)
        facts = ranks.shared(facts)
        if facts is not None:
            report.say(f"stage {step.name}: done before")
        else:
            report.stage = step.name
            report.say(f"stage {step.name}")
            facts = _run_stage(step, replace(context, current=artefact), folder)
        artefact = _here(facts, context)


def _run_stage(step: Step, context: Context, folder: RunFolder | GuestFolder) -> dict:
    """Run a stage, in all processes or the first one alone; what it leaves, as JSON."""
    stage = importlib.import_module(f"toolkit.stages.{step.kind}")
    ranks = context.ranks
    with ranks.agreed():
        current = context.current
        if current is None and context.base is not None:
            current = Artefact(context.base, context.base)
        place = folder.stage_folder(step.name)
        context = replace(context, folder=place, current=current)
    if hasattr(stage, "TOGETHER"):
        artefact = stage.run(step.config, context)
    else:
        with ranks.agreed():
            artefact = stage.run(step.config, context) if ranks.is_first else None
    with ranks.agreed():
        if ranks.is_first:
            facts = artefact.to_json(folder.path)
            folder.finish(step.name, facts, _own(artefact, folder.path))
    return ranks.shared(facts if ranks.is_first else None)


def _here(facts: dict, context: Context) -> Artefact:
    """An artefact of the first process; the recipe's model has its own place here."""
    artefact = Artefact.from_json(facts, context.output)
    if context.ranks.is_first or artefact.model.is_relative_to(context.output):
        return artefact
    return Artefact(context.base, context.base, facts=artefact.facts)


def _context(
    loaded: Loaded, folder: RunFolder | GuestFolder, report: Report, ranks: Ranks
) -> Context:
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
        ranks=ranks,
    )


def _own(artefact: Artefact, output: Path) -> list[Path]:
    """The artefact's folders that lie in the run folder, and so are ours to check."""
    folders = {artefact.model, artefact.reference, artefact.adapters} - {None}
    folders |= {*artefact.published}
    return sorted(path for path in folders if path.is_relative_to(output))
