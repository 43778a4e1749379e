"""Distillation of a draft model: data, training, quantization, benchmark."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..config.draft import DraftConfig
from ..config.train import CACHED_LOGITS, CHUNK_LOGITS
from ..cpu import on_cpu
from ..draft.acceptance import all_acceptance_probs, predict_accepted_lengths
from ..draft.cost_model import SpeculationCosts, measure_speculation_costs
from ..draft.dataset import mean_prompt_length
from ..draft.losses import DraftLoss, acceptance_bounds
from ..models.checkpoint import config_int, weights_digest
from ..models.loader import LoadedModel, set_compute_dtype
from ..models.trunk_head import NoTrunkHeadSplit
from ..training.chunked_loss import ChunkedLoss
from ..training.optimizers import OptimizerConfig
from ..training.schedules import learning_rate_at
from ..training.step import TrainStep
from ..training.trainer import Trainer, TrainerConfig
from .context import ModelArtifact, StageContext, write_model
from .draft_benchmark import DraftEvaluation
from .draft_setup import DraftData, DraftInitializer
from .estimate import training_dtype
from .quantize import QuantizeStage

WARMUP_RATIO, MIN_LR_RATIO = 0.05, 0.1
# Training steps of every candidate shape before the shapes are compared.
CANDIDATE_STEPS = 40
# Tokens on which the importance of blocks and channels is measured.
IMPORTANCE_TOKENS = 256


class DraftDistillation:
    """Makes the draft model of one draft stage."""

    def __init__(self, config: DraftConfig, context: StageContext):
        self.config = config
        self.context = context
        self.target = context.load(context.current.model)
        self.digest = weights_digest(self.target.path)
        self.data = DraftData(config, context, self.target, self.digest)
        # Here, so that a bad baseline model is refused before the training.
        self.evaluation = DraftEvaluation(self.data)

    def run(self) -> ModelArtifact:
        """Leave the draft model in draft/ and its metrics in report.json."""
        context = self.context
        initializer = DraftInitializer(
            self.config.draft_model, context, self.target, self._sample_tokens()
        )
        initial = initializer.init(self._predict_speedup)
        # Its source model needs memory.
        del initializer
        trained, facts = self._train(initial)
        draft = self._quantize(trained)
        if draft != trained:
            costs = self._costs(draft)
            predicted = self._predict(context.load(draft).model, costs)
            context.logger.info(f"quantized: {_summary(predicted)}")
            facts |= {"before_quantizing": facts["expected"], "expected": predicted}
        return self.evaluation.run(draft, facts)

    def _sample_tokens(self) -> mx.array:
        """Tokens [1, L] of completions, on which importance is measured."""
        tokens = [batch.tokens.reshape(-1) for batch in self.data.eval_batches]
        return mx.concatenate(tokens)[None, :IMPORTANCE_TOKENS]

    def _make_step(self, folder: Path) -> tuple[TrainStep, LoadedModel]:
        config, loaded = self.config, self.context.load(folder, compute="stored")
        compute = training_dtype("auto", loaded.dtype)
        loss = DraftLoss(config.loss, eta=config.eta, cross_entropy=config.ce_weight)
        step = TrainStep(
            loaded.model,
            OptimizerConfig(max_grad_norm=1.0),
            compute_dtype=compute,
            chunked_loss=_chunked_loss(loaded),
            teacher_loss=loss,
        )
        set_compute_dtype(loaded.model, compute)
        return step, loaded

    def _predict_speedup(self, folder: Path) -> float:
        """The predicted speed-up of a candidate after a few training steps."""
        costs = self._costs(folder)
        step, _ = self._make_step(folder)
        steps = min(CANDIDATE_STEPS, self.config.steps)
        for number in range(steps):
            batch = self.data.train_batches(number)
            step(batch, self._learning_rate(number, steps), number)
            mx.eval(step.parameters, step.optimizer.state)
        return self._predict(step.materialize(), costs)["predicted_speedup"]

    def _costs(self, folder: Path) -> SpeculationCosts:
        """Costs of the target and of the model in a folder, as they are served."""
        draft, prompts = self.context.load(folder).model, self.data.benchmark_prompts
        return measure_speculation_costs(
            self.target.model, draft, prompt_length=mean_prompt_length(prompts)
        )

    def _learning_rate(self, number: int, steps: int) -> float:
        return learning_rate_at(
            number,
            steps,
            peak=self.config.learning_rate,
            schedule="cosine",
            warmup_ratio=WARMUP_RATIO,
            min_lr_ratio=MIN_LR_RATIO,
        )

    def _predict(self, model, costs: SpeculationCosts) -> dict:
        """Acceptance on held-out completions, and the speed-up that it predicts."""
        low = high = count = 0.0
        for batch in self.data.eval_batches:
            mask = np.array(batch.mask)
            lower, upper = map(np.array, acceptance_bounds(model, batch))
            low, high = low + lower[mask].sum(), high + upper[mask].sum()
            count += mask.sum()
        references = self.data.references
        curves = [
            predict_accepted_lengths(all_acceptance_probs(texts, model))
            for texts in references.values()
        ]
        lengths = [
            len(text.tokens) - 1 for texts in references.values() for text in texts
        ]
        curve = np.mean(curves, axis=0).tolist()
        length, speedup = costs.best_draft_length(
            curve, float(np.mean(lengths)) or math.inf
        )
        return {
            "acceptance_lower_bound": float(low / count),
            "acceptance_upper_bound": float(high / count),
            "accepted_length": curve,
            "num_draft_tokens": length,
            "predicted_speedup": speedup,
        } | {
            f"accepted_length_{name.replace(' ', '_')}": values
            for name, values in zip(references, curves, strict=True)
        }

    def _train(self, initial: Path) -> tuple[Path, dict]:
        """The folder of the trained draft model, and facts about the training."""
        costs, logger = self._costs(initial), self.context.logger
        step, loaded = self._make_step(initial)

        def log_prediction(done: int) -> None:
            predicted = self._predict(step.materialize(), costs)
            logger.metrics({"kind": "draft", "step": done} | predicted)
            logger.info(f"step {done}: {_summary(predicted)}")

        trainer = self._trainer(step, log_prediction)
        loss = trainer.train()
        folder = self.context.folder / "dense"
        weights = dict(tree_flatten(step.materialize().parameters()))
        weights = {k: v.astype(loaded.dtype) for k, v in weights.items()}
        parameters = sum(value.size for value in weights.values())
        write_model(folder, loaded, weights)
        return folder, {
            "parameters": parameters,
            "steps": trainer.selected_step,
            "trained_tokens": trainer.progress.trained_tokens,
            "validation_loss": loss,
            "expected": self._predict(step.materialize(), costs),
        }

    def _trainer(self, step: TrainStep, on_evaluate: Callable[[int], None]) -> Trainer:
        config = self.config
        return Trainer(
            step,
            self.data.train_batches,
            TrainerConfig(
                steps=config.steps,
                seed=self.context.seed,
                checkpoint_dir=self.context.folder / "checkpoints",
                logging_steps=config.logging_steps,
                eval_steps=config.eval_steps,
                save_steps=config.save_steps,
                load_best_at_end=True,
            ),
            learning_rate=lambda number: self._learning_rate(number, config.steps),
            eval_batches=list(self.data.eval_batches),
            logger=self.context.logger,
            on_evaluate=on_evaluate,
            callbacks=self.context.extensions.callbacks,
        )

    def _quantize(self, trained: Path) -> Path:
        """The folder of the draft model as it will be served."""
        if not self.config.quantization:
            return trained
        folder = self.context.folder / "quantization"
        folder.mkdir(exist_ok=True)
        current = ModelArtifact(trained, trained)
        context = replace(self.context, folder=folder, current=current)
        return QuantizeStage(self.config.quantization).run(context).model


def _summary(predicted: dict) -> str:
    length = predicted["num_draft_tokens"]
    return (
        "sampled acceptance rate between "
        f"{predicted['acceptance_lower_bound']:.1%} and "
        f"{predicted['acceptance_upper_bound']:.1%}; predicted with {length} draft "
        f"tokens: accepted length {predicted['accepted_length'][length - 1]:.2f}, "
        f"speed-up {predicted['predicted_speedup']:.2f}x"
    )


def _chunked_loss(loaded: LoadedModel) -> ChunkedLoss | None:
    """The chunked loss; None if the model cannot be split into trunk and head."""
    logits = CACHED_LOGITS if on_cpu() else CHUNK_LOGITS
    try:
        chunk = max(64, logits // config_int(loaded.config, "vocab_size"))
        return ChunkedLoss(loaded.model, chunk)
    except NoTrunkHeadSplit:
        return None
