"""The `loss` block of a train stage with preference data."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .base import ConfigModel

Weight = Annotated[float, Field(ge=0)]

# Defaults that a loss has of its own.
DEFAULTS = {
    "cpo": {"sft_weight": 1.0},
    "orpo": {"sft_weight": 1.0},
    "simpo": {"beta": 2.0},
}
# Keys besides beta that only some losses have.
KEYS = {
    "dpo": {"label_smoothing", "sft_weight"},
    "ipo": {"sft_weight"},
    "cpo": {"label_smoothing", "sft_weight"},
    "simpo": {"gamma", "sft_weight"},
    "orpo": {"sft_weight"},
    "kto": {"desirable_weight", "undesirable_weight"},
}


class PreferenceLossConfig(ConfigModel):
    """A loss of examples with a chosen and a rejected completion, or with a label. The
    reference is the model that the stage starts from, without the adapter."""

    type: Literal["dpo", "ipo", "cpo", "simpo", "orpo", "kto"] = "dpo"
    """dpo: logistic loss of the difference between the rewards of both completions,
    where a reward is beta times the log-ratio of model and reference (arXiv
    2305.18290). ipo: squared distance of the difference between both log-ratios, per
    token, from 1 / (2 beta) (arXiv 2310.12036). cpo: dpo without a reference, and the
    cross-entropy of the chosen completion (arXiv 2401.08417). simpo: logistic loss of
    the difference between both mean log-probabilities of a token, without a reference
    (arXiv 2405.14734). orpo: cross-entropy of the chosen completion, and logistic loss
    of the odds ratio, without a reference (arXiv 2403.07691). kto: every example has
    one completion and a label, true if it is desirable (arXiv 2402.01306)."""
    beta: float = Field(0.1, gt=0)
    """dpo, ipo, kto: strength of the tie to the reference; the model moves further with
    less. cpo, simpo: scale of the log-probabilities (simpo: default 2). orpo: weight of
    the odds ratio loss."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """dpo, cpo: assumed probability that a preference is the wrong way round
    (conservative DPO)."""
    gamma: Weight = 1.0
    """simpo: target margin between both rewards."""
    sft_weight: Weight = 0.0
    """Not kto: weight of the cross-entropy of the chosen completion, per token. Default
    1 for cpo and orpo."""
    desirable_weight: Weight = 1.0
    """kto: weight of examples with a true label."""
    undesirable_weight: Weight = 1.0
    """kto: weight of examples with a false label. Its ratio to desirable_weight should
    balance the numbers of both within a factor of 4/3."""

    @model_validator(mode="before")
    @classmethod
    def _set_defaults(cls, value):
        if not isinstance(value, dict):
            return value
        name = value.get("type", "dpo")
        defaults = DEFAULTS.get(name, {}) if isinstance(name, str) else {}
        return {"type": name, **defaults, **value}

    @model_validator(mode="after")
    def _check_keys(self):
        # A resolved recipe gives all keys, so only other values than the default count.
        fields = type(self).model_fields
        for key in sorted(set().union(*KEYS.values()) - KEYS[self.type]):
            if getattr(self, key) != fields[key].default:
                raise ValueError(f"the loss {self.type} has no {key}")
        return self

    @property
    def is_paired(self) -> bool:
        """Whether an example has two completions, not one and a label."""
        return self.type != "kto"
