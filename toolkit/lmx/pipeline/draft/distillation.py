"""What the distillation of a draft model and of a drafter have in common."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ...config.budget import budget_seconds
from ...config.draft import DraftConfig
from ...data.batching import Batch
from ...draft.acceptance import ReferenceCompletion, predict_accepted_lengths
from ...draft.candidates import Candidate, all_acceptance_probs
from ...draft.cost_model import SpeculationCosts
from ...draft.text_first import Batches, TextFirst
from ...models.checkpoint import weights_digest
from ...models.dtypes import set_compute_dtype
from ...training.optimizers import OptimizerConfig
from ...training.schedules import learning_rate_at
from ...training.step import TrainStep
from ...training.trainer import Trainer, TrainerConfig
from ..budget import seconds_per_step, steps_within
from ..context import ModelArtifact, StageContext
from ..estimate import training_dtype
from .setup import DraftData

WARMUP_RATIO, MIN_LR_RATIO = 0.05, 0.1
# The target's completions by decoding mode.
References = dict[str, list[ReferenceCompletion]]


class DraftDistillation(ABC):
    """Makes the draft of one draft stage by distilling the current model.

    All ranks make the data and train. The first one does everything else.
    """

    def __init__(self, config: DraftConfig, context: StageContext):
        self.config = config
        self.context = context
        self.target = context.load(context.current.model)
        self.digest = weights_digest(self.target.path)
        self.data = DraftData(config, context, self.target, self.digest)

    def run(self) -> ModelArtifact:
        """Leave the draft in draft/ and its metrics in report.json.

        Raises:
            UserError: the ranks have other models or data.
        """
        ranks = self.context.ranks
        self.data.generate()
        self.cache_targets()
        if ranks.is_first:
            self.prepare()
        ranks.wait_for_all()
        trainer = self.make_trainer()
        loss = self.context.train(trainer)
        if not ranks.is_first:
            return self.context.current
        return self.finish(trainer, loss)

    def cache_targets(self) -> None:  # noqa: B027
        """Compute predictions of the target that `prepare` needs, on all ranks."""

    def prepare(self) -> None:  # noqa: B027
        """What the first rank does alone, before the others make their trainers."""

    @abstractmethod
    def make_trainer(self) -> Trainer:
        """The trainer of this rank."""

    @abstractmethod
    def predicted(self, model: nn.Module, references: References) -> dict:
        """Metrics of the model or drafter on held-out completions."""

    @abstractmethod
    def finish(self, trainer: Trainer, loss: float) -> ModelArtifact:
        """Write, benchmark and publish the trained draft.

        Args:
            loss: the validation loss of the trained weights.
        """

    def make_step(self, model: nn.Module, dtype: mx.Dtype, **losses) -> TrainStep:
        """A step of a model or drafter that is stored in `dtype`."""
        compute = training_dtype("auto", dtype)
        paths = [path for path, _ in tree_flatten(model.trainable_parameters())]
        step = TrainStep(
            model,
            OptimizerConfig(max_grad_norm=1.0),
            stored_dtypes=dict.fromkeys(paths, dtype),
            compute_dtype=compute,
            ranks=self.context.ranks,
            **losses,
        )
        set_compute_dtype(model, compute)
        return step

    def predict(
        self, candidate: Candidate, costs: SpeculationCosts, references: References
    ) -> dict:
        """Accepted lengths on held-out completions, and the speed-up they predict."""
        curves = [
            predict_accepted_lengths(all_acceptance_probs(texts, candidate))
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
            "accepted_length": curve,
            "num_draft_tokens": length,
            "predicted_speedup": speedup,
        } | {
            f"accepted_length_{name.replace(' ', '_')}": values
            for name, values in zip(references, curves, strict=True)
        }

    def trainer(
        self,
        make_step: Callable[[], TrainStep],
        parts: list[Batches],
        eval_batches: Iterable[Batch],
    ) -> Trainer:
        """The trainer of the stage's steps.

        Args:
            parts: batches of the training, one after the other; see `with_text`.
        """
        config, context = self.config, self.context
        logger, steps = context.logger, config.num_steps
        if not steps:
            seconds = budget_seconds(config.budget)
            steps = steps_within(
                seconds,
                lambda: seconds_per_step(make_step(), parts),
                context.artifacts,
                [batches.digest for batches in parts],
            )
            logger.info(f"{steps:,} steps fit into {config.budget}")
        step, (*text, batches) = make_step(), parts
        ranks = step.ranks
        if text:
            batches = TextFirst(*text, steps // 2, batches)
            logger.info(
                f"steps 1 to {steps // 2:,} train on text, the others on completions"
            )

        def accepted_length(done: int) -> float:
            """The length with all draft tokens, which all evaluations have."""
            model, length = step.materialize(), 0.0
            if ranks.is_first:
                predicted = self.predicted(model, self.data.selection_references)
                length = predicted["accepted_length"][-1]
                record = {"kind": "draft", "step": done} | predicted
                logger.metrics(record | {"accepted_length_all": length})
                logger.info(f"step {done}: {self.summary(predicted)}")
            return ranks.broadcast_object(length)

        return Trainer(
            step,
            batches,
            TrainerConfig(
                steps,
                context.seed,
                context.folder / "checkpoints",
                config.logging_steps,
                config.eval_steps,
                config.save_steps,
                load_best_at_end=True,
                early_stopping_patience=config.early_stopping_patience,
            ),
            learning_rate=partial(
                learning_rate_at,
                steps=steps,
                peak=config.learning_rate,
                schedule="cosine",
                warmup_ratio=WARMUP_RATIO,
                min_lr_ratio=MIN_LR_RATIO,
            ),
            eval_batches=list(eval_batches),
            logger=logger,
            on_evaluate=accepted_length,
            score_name="accepted length",
            on_event=context.extensions.callbacks.call,
        )

    def facts(self, trainer: Trainer, loss: float, model: nn.Module) -> dict:
        """Facts about the training of a model or drafter, for the report."""
        return {
            "steps": trainer.selected_step,
            "trained_tokens": trainer.progress.trained_tokens,
            "validation_loss": loss,
            "expected": self.predicted(model, self.data.references),
        }

    def summary(self, predicted: dict) -> str:
        """A prediction in one line."""
        length = predicted["num_draft_tokens"]
        return (
            f"predicted with {length} draft tokens: accepted length "
            f"{predicted['accepted_length'][length - 1]:.2f}, speed-up "
            f"{predicted['predicted_speedup']:.2f}x"
        )
