"""Tasks of EleutherAI's lm-evaluation-harness, through mlx-lm's wrapper of a model.

The harness is the extra `eval`.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import FAILED, UserError
from ..models.loader import LoadedModel

HARNESS_ERRORS = (KeyError, ValueError, OSError, NotImplementedError, SystemExit)
SUFFIXES = (".yaml", ".yml")

Scores = dict[str, dict[str, float]]


def is_file(task: str) -> bool:
    """Whether a task is a file of the user instead of one of the harness."""
    return task.endswith(SUFFIXES)


def is_installed() -> bool:
    """Whether the harness is installed."""
    return find_spec("lm_eval") is not None


def require(tasks: Iterable[str]) -> None:
    """Refuse unknown task names, before any work.

    Raises:
        UserError: the harness has no task of this name.
    """
    for task in tasks:
        if not is_file(task) and task not in _manager(True).task_index:
            raise UserError(
                "lm-evaluation-harness has no task of this name",
                hint="`lm_eval ls tasks` lists them; task files end in .yaml",
                place=task,
            )


def measure_tasks(
    loaded: LoadedModel, tasks: Sequence[str | Path], *, limit: int | None = None
) -> Scores:
    """All metrics of all tasks.

    Args:
        tasks: names of the harness, or task files.
        limit: documents per task; None = all.

    Returns:
        task: {metric: value, metric_stderr: value}; only numbers.

    Raises:
        UserError: a task is unknown, or its documents cannot be read.
    """
    import lm_eval
    from mlx_lm import evaluate

    names = [str(task) for task in tasks]
    # mlx-lm's wrapper loads a model; here it gets the loaded one.
    load = evaluate.load
    evaluate.load = lambda *_, **__: (loaded.model, loaded.tokenizer)
    try:
        model = evaluate.MLXLM(str(loaded.path))
    finally:
        evaluate.load = load
    try:
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=names,
            task_manager=_manager(not all(map(is_file, names))),
            limit=limit,
            # As in `mlx_lm.evaluate`.
            apply_chat_template=model.use_chat_template,
            fewshot_as_multiturn=False,
            log_samples=False,
        )
    except HARNESS_ERRORS as error:
        raise UserError(
            f"the tasks cannot be measured: {error}",
            hint="offline, the harness reads only datasets that are cached",
            place=", ".join(names),
            code=FAILED,
        ) from error
    measured: Scores = {}
    for task, scores in results["results"].items():
        measured[task] = {}
        # The keys are `metric,filter`.
        for key, value in scores.items():
            metric, comma, filter_name = key.partition(",")
            if comma and isinstance(value, int | float):
                name = metric if filter_name == "none" else key
                measured[task][name] = float(value)
    return measured


@cache
def _manager(with_names: bool) -> Any:
    """The harness's list of tasks; reading its 14,000 default tasks takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=with_names)
