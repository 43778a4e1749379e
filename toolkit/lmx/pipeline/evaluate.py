"""The validate stage: reload the artefact from disk, measure it, check the gates."""

from typing import TYPE_CHECKING

from ..config.evaluate import EvaluateConfig

if TYPE_CHECKING:
    from .context import ModelArtifact, StageContext


def run(config: EvaluateConfig, context: "StageContext") -> "ModelArtifact":
    """Measure base, tuned and quantized model; write report.json; check the gates.

    Raises:
        UserError: a gate is missed (exit code 1), after the report is written.
    """
    from .evaluator import Evaluator

    measuring = Evaluator(config, context)
    measuring.run()
    measuring.check()
    return context.current
