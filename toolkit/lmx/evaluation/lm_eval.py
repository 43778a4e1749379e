"""Tasks of EleutherAI's lm-evaluation-harness, through mlx-lm's wrapper of a model.

The harness is an extra: pip install 'lmx-toolkit[eval]'.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import FAILED, UserError
from ..models.loader import LoadedModel

FAULTS = (KeyError, ValueError, OSError, NotImplementedError)
SUFFIXES = (".yaml", ".yml")

Scores = dict[str, dict[str, float]]


def is_file(task: str) -> bool:
    """Whether a task is a file of the user's own, rather than the harness's."""
    return task.endswith(SUFFIXES)


def is_installed() -> bool:
    """Whether the harness is here."""
    return find_spec("lm_eval") is not None


def require(tasks: Iterable[str]) -> None:
    """Refuse names that the harness does not know, before any work.

    Raises:
        UserError: naming the first such task.
    """
    for task in tasks:
        if not is_file(task) and task not in _manager(True).task_index:
            raise UserError(
                "lm-evaluation-harness knows no task of this name",
                hint="`lm_eval ls tasks` shows them; a file of yours ends in .yaml",
                place=task,
            )


def measure_tasks(
    loaded: LoadedModel, tasks: Sequence[str | Path], *, documents: int | None = None
) -> Scores:
    """Every metric of every task, as the harness scores a model.

    Args:
        tasks: names of the harness's, or files of tasks.
        documents: of each task, at most; None = all.

    Returns:
        task: {metric: value, metric_stderr: value}; what is no number is left out.

    Raises:
        UserError: a task is not known, or its documents cannot be read.
    """
    import lm_eval

    names = [str(task) for task in tasks]
    model = _wrapped(loaded)
    try:
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=names,
            task_manager=_manager(not all(map(is_file, names))),
            limit=documents,
            # As `mlx_lm.evaluate` asks.
            apply_chat_template=model.use_chat_template,
            fewshot_as_multiturn=False,
            log_samples=False,
        )
    except FAULTS as error:
        raise UserError(
            f"the tasks cannot be measured: {error}",
            hint="offline, the harness reads only data sets that are here",
            place=", ".join(names),
            code=FAILED,
        ) from error
    return {task: _metrics(scores) for task, scores in found["results"].items()}


def _metrics(scores: dict[str, Any]) -> dict[str, float]:
    """The numbers among a task's results, whose keys are `metric,filter`."""
    found = {}
    for key, value in scores.items():
        metric, comma, answers = key.partition(",")
        if comma and isinstance(value, int | float):
            found[metric if answers == "none" else key] = float(value)
    return found


@cache
def _manager(with_names: bool) -> Any:
    """The harness's list of tasks; reading its own 14,000 takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=with_names)


def _wrapped(loaded: LoadedModel) -> Any:
    """mlx-lm's wrapper of the very model that is measured, rather than a second one."""
    from mlx_lm import evaluate

    stock = evaluate.load
    evaluate.load = lambda *_, **__: (loaded.model, loaded.tokenizer)
    try:
        return evaluate.MLXLM(str(loaded.path))
    finally:
        evaluate.load = stock
