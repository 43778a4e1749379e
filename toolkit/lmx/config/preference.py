"""The `loss` block of a train stage: preference losses, by type."""

from typing import Annotated, Literal

from pydantic import Field

from .base import ConfigModel

Beta = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]


class DPOLossConfig(ConfigModel):
    """Direct preference optimization (arXiv 2305.18290): the logistic loss of the
    difference between the rewards of both completions. A reward is beta times the
    log-ratio of model and reference. The reference is the model that the stage starts
    from, without the adapter."""

    type: Literal["dpo"] = "dpo"
    """Loss. Default: dpo."""
    beta: Beta = 0.1
    """Strength of the tie to the reference: the model moves further with less."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed probability that a preference is the wrong way round (conservative
    DPO)."""
    sft_weight: Weight = 0.0
    """Weight of the cross-entropy of the chosen completion, per token."""


class IPOLossConfig(ConfigModel):
    """Identity preference optimization (arXiv 2310.12036): the squared distance of the
    difference between both log-ratios, per token, from 1 / (2 beta)."""

    type: Literal["ipo"] = "ipo"
    """Loss. Default: dpo."""
    beta: Beta = 0.1
    """Strength of the tie to the reference: the model moves further with less."""
    sft_weight: Weight = 0.0
    """Weight of the cross-entropy of the chosen completion, per token."""


class CPOLossConfig(ConfigModel):
    """Contrastive preference optimization (arXiv 2401.08417): DPO without a reference,
    and the cross-entropy of the chosen completion."""

    type: Literal["cpo"] = "cpo"
    """Loss. Default: dpo."""
    beta: Beta = 0.1
    """Scale of the log-probabilities."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed probability that a preference is the wrong way round."""
    sft_weight: Weight = 1.0
    """Weight of the cross-entropy of the chosen completion, per token."""


class SimPOLossConfig(ConfigModel):
    """Simple preference optimization (arXiv 2405.14734): the logistic loss of the
    difference between both mean log-probabilities of a token. Needs no reference."""

    type: Literal["simpo"] = "simpo"
    """Loss. Default: dpo."""
    beta: Beta = 2.0
    """Scale of the mean log-probabilities."""
    gamma: float = Field(1.0, ge=0)
    """Target margin between both rewards."""
    sft_weight: Weight = 0.0
    """Weight of the cross-entropy of the chosen completion, per token."""


class ORPOLossConfig(ConfigModel):
    """Odds ratio preference optimization (arXiv 2403.07691): the cross-entropy of the
    chosen completion, and the logistic loss of the odds ratio. Needs no reference and
    no fine-tuning before it."""

    type: Literal["orpo"] = "orpo"
    """Loss. Default: dpo."""
    beta: Beta = 0.1
    """Weight of the odds ratio loss."""
    sft_weight: Weight = 1.0
    """Weight of the cross-entropy of the chosen completion, per token."""


class KTOLossConfig(ConfigModel):
    """Kahneman-Tversky optimization (arXiv 2402.01306): every example has one
    completion and a label, true if it is desirable."""

    type: Literal["kto"] = "kto"
    """Loss. Default: dpo."""
    beta: Beta = 0.1
    """Strength of the tie to the reference: the model moves further with less."""
    desirable_weight: Weight = 1.0
    """Weight of examples with a true label."""
    undesirable_weight: Weight = 1.0
    """Weight of examples with a false label. Its ratio to desirable_weight should
    balance the numbers of both within a factor of 4/3."""


PreferenceLossConfig = (
    DPOLossConfig
    | IPOLossConfig
    | CPOLossConfig
    | SimPOLossConfig
    | ORPOLossConfig
    | KTOLossConfig
)
