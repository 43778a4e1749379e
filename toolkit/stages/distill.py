"""The distill stage: a small model that guesses what the current one will say."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ..draft.settings import Answers, Gates, Loss, OnPolicy, Student, Trial
from ..quant.settings import Quantize
from ..section import Section

if TYPE_CHECKING:
    from .context import Artefact, Context

Fraction = Annotated[float, Field(ge=0, le=1)]


class Config(Section):
    """Distil a draft model for speculative decoding from the current model."""

    student: Student = Student()
    """The draft's shape and what it begins with."""
    answers: Answers = Answers()
    """What the target says to the prompts of the rows, for the draft to learn."""
    loss: Loss = "acceptance"
    """forward, reverse or jensen_shannon divergence, total_variation, or acceptance:
    forward KL while guesses fall, total variation once they stand."""
    eta: float = Field(3.0, gt=0)
    """How soon the loss acceptance turns to total variation."""
    cross_entropy: Fraction = 0.1
    """Weight of the loss on the tokens themselves; the other has the rest."""
    on_policy: OnPolicy | None = None
    """Present = the last steps learn where the draft's own guesses fell."""
    steps: int = Field(1000, ge=1)
    """Optimizer steps."""
    batch_tokens: int = Field(2048, ge=8)
    """Tokens of a step, prompts and padding included."""
    learning_rate: float = Field(5e-4, gt=0)
    """Peak learning rate; it rises over 5% of the steps, then falls as a cosine."""
    evaluate_every: int = Field(200, ge=1)
    """Steps between validations; the weights of the best one are left."""
    checkpoint_every: int = Field(200, ge=1)
    """Steps between checkpoints."""
    report_every: int = Field(10, ge=1)
    """Steps between lines of the report."""
    quantization: Quantize | None = None
    """Present = quantize the draft after training, as a quantize stage would."""
    trial: Trial = Trial()
    """How the finished draft is judged."""
    require: Gates = Gates()
    """Gates that must hold, or no draft is published."""


def run(config: Config, context: "Context") -> "Artefact":
    """Distil a draft into draft/; the current model stays as it is.

    Raises:
        UserError: a student that no engine could serve, or a gate is missed (exit code
            1), after the report is written.
    """
    from .drafting import Drafting

    return Drafting(config, context).run()
