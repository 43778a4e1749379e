"""The thresholds of an evaluate stage."""

from pathlib import Path

from ...config.evaluate import EvaluationThresholds
from ...errors import FAILED, UserError
from ...run.logger import RunLogger

# The measured value that each threshold limits.
THRESHOLDS = {
    "max_kl": "kl_mean",
    "min_top1_agreement": "top1_agreement",
    "max_perplexity": "perplexity",
    "max_perplexity_ratio": "perplexity_ratio",
    "min_exact_match": "exact_match",
}


def compare(thresholds: EvaluationThresholds, figures: dict) -> list[dict]:
    """The thresholds as in report.json; a value that was not measured misses its own.

    Args:
        figures: of the model that is to meet them.
    """
    return [
        _compared(name, limit, figures.get(THRESHOLDS[name]))
        for name, limit in thresholds.model_dump().items()
        if limit is not None
    ]


def _compared(name: str, limit: float, value: float | None) -> dict:
    passed = value is not None and (
        value >= limit if name.startswith("min_") else value <= limit
    )
    return {"name": name, "value": value, "limit": limit, "passed": passed}


def require(results: list[dict], model: str, path: Path, logger: RunLogger) -> None:
    """Log the results of `compare`.

    Raises:
        UserError: one is missed; its code is 1.
    """
    for result in results:
        status = "passed" if result["passed"] else "MISSED"
        value = "not measured"
        if result["value"] is not None:
            value = f"{result['value']:.4g}"
        logger.info(
            f"threshold {result['name']}: {value}, limit {result['limit']:g}: {status}"
        )
    if missed := [result["name"] for result in results if not result["passed"]]:
        raise UserError(
            f"the {model} model misses its thresholds: {', '.join(missed)}; nothing is "
            "published",
            place=str(path),
            hint="train longer, use more bits, or loosen `thresholds`",
            code=FAILED,
        )
