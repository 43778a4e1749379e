"""Preference losses, GRPO's losses and their gradients equal those of TRL's trainers.

With TRL 1.16.0 in float64 and lmx in float32, losses differ by at most 1.3e-7 and
gradients with respect to log-probabilities by at most 1.9e-8. TRL's SFT terms are other
means (over all tokens of a batch; for ORPO also over the prompt), so these tests leave
them out.
"""

import importlib
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.train import TrainConfig
from lmx.training.grpo_loss import GRPOLoss, group_advantages
from lmx.training.preference_loss import PreferenceLoss

torch = pytest.importorskip("torch")
pytest.importorskip("trl", minversion="1.16")
pytestmark = pytest.mark.filterwarnings("ignore")

GENERATOR = np.random.default_rng(0)
PAIRS, LENGTH, MAX_TOKENS = 6, 9, 12
SIZE = 2 * PAIRS
LOGPS = -GENERATOR.exponential(1.0, (SIZE, LENGTH))
MASK = GENERATOR.random((SIZE, LENGTH)) < 0.6
MASK[:, -1] = True
REFERENCE = (LOGPS * MASK).sum(axis=1) + GENERATOR.normal(0, 2, SIZE)
# Chosen completions have the higher rewards, so that swapped pairs are noticed.
REFERENCE[::2] -= 2
LABELS = np.repeat([True, False, False, True, True, False], 2)
OLD_LOGPS = LOGPS + GENERATOR.normal(0, 0.3, LOGPS.shape)
REFERENCE_LOGPS = LOGPS + GENERATOR.normal(0, 0.2, LOGPS.shape)
REWARDS = GENERATOR.normal(size=SIZE)
# A batch of TRL has the chosen completions, then the rejected ones.
SIDES = np.r_[0:SIZE:2, 1:SIZE:2]
PREFERENCES = {
    "dpo": {"beta": 0.3},
    "ipo": {"beta": 0.2},
    "kto": {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.6},
    "cpo": {"beta": 0.2, "label_smoothing": 0.2, "sft_weight": 0.0},
    "simpo": {"beta": 2.5, "gamma": 0.8},
    "orpo": {"beta": 0.4, "sft_weight": 0.0},
}
GROUP = 4
CLIPPING = {"epsilon": 0.1, "epsilon_high": 0.15}
POLICIES = {name: {"loss_type": name} for name in ("grpo", "dr_grpo", "dapo")} | {
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"}
}


@pytest.fixture(scope="module")
def make_trainer(make_checkpoint, tmp_path_factory):
    """A function from the names of a module and a trainer to TRL's trainer."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    checkpoint = str(make_checkpoint(dtype="float32"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    row = {"prompt": "a ", "chosen": "b", "rejected": "c", "completion": "b"}
    rows = Dataset.from_list([row | {"label": True}, row | {"label": False}])
    shared = {
        "use_cpu": True,
        "report_to": "none",
        "bf16": False,
        "gradient_checkpointing": False,
    }

    def trainer(module: str, name: str, **settings):
        package = importlib.import_module(module)
        folder = str(tmp_path_factory.mktemp(name))
        config = getattr(package, f"{name}Config")(folder, **shared, **settings)
        rewards = {}
        if name == "GRPO":
            rewards = {
                "reward_funcs": lambda completions, **_: [0.0] * len(completions)
            }
        return getattr(package, f"{name}Trainer")(
            model=checkpoint,
            args=config,
            train_dataset=rows,
            processing_class=tokenizer,
            **rewards,
        )

    return trainer


def outputs_of(logps):
    """What a model of TRL returns, with chosen log-probabilities."""
    zeros = torch.zeros_like(logps).detach()
    return SimpleNamespace(
        log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )


def sequences_of(mask) -> dict:
    """Inputs of a TRL batch whose targets have this mask; the tokens are not read."""
    mask = torch.tensor(mask).long()
    mask = torch.nn.functional.pad(mask, (1, 0))
    return {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
    }


def trl_dpo(make_trainer, name: str, options: dict, logps):
    kind = {"dpo": "sigmoid", "ipo": "ipo"}[name]
    trainer = make_trainer("trl", "DPO", beta=options["beta"], loss_type=kind)
    trainer.precompute_ref_logps = True
    chosen, rejected = torch.tensor(REFERENCE[SIDES]).chunk(2)
    inputs = sequences_of(MASK[SIDES]) | {
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    masked = (logps * torch.tensor(MASK))[SIDES]
    return trainer._compute_loss(lambda **_: outputs_of(masked), inputs, False)


def trl_kto(make_trainer, name: str, options: dict, logps):
    trainer = make_trainer("trl", "KTO", **options, per_device_train_batch_size=2)
    trainer.precompute_ref_logps = True
    masked = logps * torch.tensor(MASK)
    trainer._compute_kl_logps = lambda *_: masked[1::2].sum(-1).detach()
    inputs = sequences_of(MASK[::2]) | {
        "label": torch.tensor(LABELS[::2]),
        "ref_logps": torch.tensor(REFERENCE[::2]),
        "ref_KL_logps": torch.tensor(REFERENCE[1::2]),
    }
    return trainer._compute_loss(lambda **_: outputs_of(masked[::2]), inputs, False)


def trl_cpo(make_trainer, name: str, options: dict, logps):
    settings = {
        "beta": options["beta"],
        "loss_type": {"cpo": "sigmoid", "simpo": "simpo"}[name],
        "label_smoothing": options.get("label_smoothing", 0.0),
        "simpo_gamma": options.get("gamma", 0.0),
        "cpo_alpha": 0.0,
    }
    trainer = make_trainer("trl.experimental.cpo", "CPO", **settings)
    values = (logps * torch.tensor(MASK)).sum(-1)
    if name == "simpo":
        values = values / torch.tensor(MASK.sum(axis=1))
    losses, _, _ = trainer.cpo_loss(values[::2], values[1::2])
    return losses.mean()


def trl_orpo(make_trainer, name: str, options: dict, logps):
    trainer = make_trainer("trl.experimental.orpo", "ORPO", beta=options["beta"])
    counts = torch.tensor(MASK.sum(axis=1))
    values = (logps * torch.tensor(MASK)).sum(-1) / counts
    # The trainer subtracts this mean from the cross-entropy.
    return -trainer.odds_ratio_loss(values[::2], values[1::2])[0].mean()


TRL_LOSSES = {
    "dpo": trl_dpo,
    "ipo": trl_dpo,
    "kto": trl_kto,
    "cpo": trl_cpo,
    "simpo": trl_cpo,
    "orpo": trl_orpo,
}


def trl_grpo(make_trainer, name: str, beta: float, advantages, logps):
    trainer = make_trainer(
        "trl",
        "GRPO",
        **POLICIES[name],
        **CLIPPING,
        beta=beta,
        # The KL estimate of the GRPO paper; TRL 1.16 multiplies it by the ratio.
        use_bias_correction_kl=False,
        max_completion_length=MAX_TOKENS,
        num_generations=2,
        per_device_train_batch_size=2,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        logps,
        torch.zeros_like(logps).detach(),
        None,
    )
    tokens = torch.ones(MASK.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": tokens[:, :1],
        "completion_ids": tokens,
        "completion_mask": torch.tensor(MASK).long(),
        "advantages": torch.tensor(np.array(advantages), dtype=torch.float64),
        "old_per_token_logps": torch.tensor(OLD_LOGPS),
        "ref_per_token_logps": torch.tensor(REFERENCE_LOGPS),
        "num_items_in_batch": torch.tensor(float(MASK.sum())),
    }
    return trainer._compute_loss(trainer.model, inputs)


def lmx_loss(loss, logps, *others):
    """The mean loss and its gradient."""
    others = [
        mx.array(v, mx.float32) if v.dtype == float else mx.array(v) for v in others
    ]

    def mean(values):
        total, count, _ = loss.from_log_probs(values, *others)
        return total / count

    value, gradient = mx.value_and_grad(mean)(mx.array(logps, mx.float32))
    return value.item(), np.array(gradient)


def assert_equal(value: float, gradient: np.ndarray, expected, logps) -> None:
    """Compare with a loss of TRL and the gradient that it gives `logps`."""
    expected.backward()
    assert value == pytest.approx(expected.item(), abs=1e-6)
    np.testing.assert_allclose(gradient, logps.grad.numpy(), atol=1e-6)
    assert np.abs(gradient).max() > 1e-3


def trainable_logps():
    return torch.tensor(LOGPS, requires_grad=True)


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_loss_equals_that_of_trl(name, make_trainer):
    options = PREFERENCES[name]
    config = TrainConfig(steps=1, batch_size=1, loss={"type": name} | options).loss
    others = [MASK] + ([REFERENCE] if name in ("dpo", "ipo", "kto") else [])
    others += [LABELS] if name == "kto" else []
    value, gradient = lmx_loss(PreferenceLoss(config), LOGPS, *others)
    logps = trainable_logps()
    expected = TRL_LOSSES[name](make_trainer, name, options, logps)
    assert_equal(value, gradient, expected, logps)


@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("name", POLICIES)
def test_policy_loss_equals_that_of_trl(name, beta, make_trainer):
    block = {"type": "grpo", "rewards": ["exact_match"], "beta": beta}
    block |= CLIPPING | POLICIES[name]
    config = TrainConfig(steps=1, batch_size=1, loss=block, rollouts={}).loss
    loss = GRPOLoss(config, temperature=1.0, max_tokens=MAX_TOKENS)
    rewards = mx.array(REWARDS, mx.float32).reshape(-1, GROUP)
    advantages = group_advantages(rewards, scale=name != "dr_grpo").reshape(-1)
    others = [MASK, np.array(advantages), REWARDS, OLD_LOGPS, REFERENCE_LOGPS]
    value, gradient = lmx_loss(loss, LOGPS, *others)
    logps = trainable_logps()
    expected = trl_grpo(make_trainer, name, beta, advantages, logps)
    assert_equal(value, gradient, expected, logps)


def test_controls_differ_from_trl(make_trainer):
    """Swapped pairs, and an unmasked prompt, are noticed."""
    options = PREFERENCES["dpo"]
    loss = PreferenceLoss(
        TrainConfig(steps=1, batch_size=1, loss={"type": "dpo"} | options).loss
    )
    expected = trl_dpo(make_trainer, "dpo", options, trainable_logps()).item()
    swapped = np.arange(SIZE).reshape(-1, 2)[:, ::-1].reshape(-1)
    for faulty in (
        (LOGPS[swapped], MASK[swapped], REFERENCE[swapped]),
        (LOGPS, np.ones_like(MASK), REFERENCE),
    ):
        assert abs(lmx_loss(loss, *faulty)[0] - expected) > 1e-2
