"""What a recipe says of the teacher of a train stage."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .base import ConfigModel

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd", "cakld"]


class TeacherGenerationConfig(ConfigModel):
    """The teacher's own answers, in place of those of the rows (arXiv 2305.17888)."""

    temperatures: list[Annotated[float, Field(ge=0)]] = Field([1.0], min_length=1)
    """Every row is answered once at each; 0 = the likeliest token always, 1 = as the
    teacher would."""
    max_tokens: int = Field(256, ge=1)
    """Longest answer."""


class TeacherConfig(ConfigModel):
    """A model whose predictions are learned (distillation)."""

    model: str | None = None
    """A folder or Hub id with the same tokenizer; absent = the unquantized model that
    the stage starts from."""
    loss: DivergenceName = "forward_kl"
    """What is made small: forward = KL(teacher || student), reverse = KL(student ||
    teacher), jensen_shannon = between the two, confidence = a mix of both by how sure
    the teacher is of the rows (arXiv 2402.10631)."""
    temperature: float = Field(1.0, gt=0)
    """What the logits of both are divided by."""
    ce_weight: float = Field(0.0, ge=0, lt=1)
    """Share of the loss that is that of the rows' own tokens."""
    offline: bool = False
    """Ask the teacher once, before training, and keep its top_k likeliest tokens of
    every position on disk; else it runs beside the student in every step."""
    top_k: int = Field(64, ge=1)
    """Tokens of a position that are kept; all others are one outcome, the rest."""
    sequence_level: TeacherGenerationConfig | None = None
    """Present = train on the teacher's own answers to the rows."""

    @model_validator(mode="after")
    def _consistent(self):
        if not self.offline and self.top_k != type(self).model_fields["top_k"].default:
            raise ValueError("top_k is for cached: true; a live teacher gives all")
        return self
