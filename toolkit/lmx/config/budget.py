"""A budget of a training, in place of its steps."""

import re
from typing import Annotated

from pydantic import AfterValidator

SECONDS = {"min": 60.0, "h": 3600.0}


def budget_seconds(budget: str | int | None) -> float | None:
    """Seconds of a budget of time; None = it is none."""
    if not isinstance(budget, str):
        return None
    unit = budget.lstrip("0123456789.")
    return float(budget.removesuffix(unit)) * SECONDS[unit]


def _check_budget(budget: str | int) -> str | int:
    if isinstance(budget, str):
        is_time = re.fullmatch(r"([0-9]{0,9}\.)?[0-9]{1,9}(min|h)", budget)
        is_valid = is_time and budget_seconds(budget) > 0
    else:
        is_valid = budget > 0
    if not is_valid:
        raise ValueError("budget is a time such as 45min or 3h, or tokens > 0")
    return budget


Budget = Annotated[str | int, AfterValidator(_check_budget)]
