"""The distill stage: a small model that guesses what the current one will say."""

from typing import TYPE_CHECKING

from ..config.draft import (
    DraftConfig,
)

if TYPE_CHECKING:
    from .context import ModelArtifact, StageContext


def run(config: DraftConfig, context: "StageContext") -> "ModelArtifact":
    """Distil a draft into draft/; the current model stays as it is.

    Raises:
        UserError: a student that no engine could serve, or a gate is missed (exit code
            1), after the report is written.
    """
    from .draft_training import DraftDistillation

    return DraftDistillation(config, context).run()
