"""How a distill stage is put together: lessons, student, training, rounding."""

import math
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
from ..draft.dataset import DistillationBatches, mean_prompt_length
from ..draft.losses import DraftLoss, acceptance_bounds
from ..draft.on_policy import OnPolicyBatches
from ..models.checkpoint import config_int, weights_digest
from ..models.loader import LoadedModel, set_compute_dtype
from ..training.chunked_loss import ChunkedLoss, ChunkedLossUnsupported
from ..training.optimizers import OptimizerConfig
from ..training.schedules import learning_rate_at
from ..training.step import TrainStep
from ..training.trainer import Trainer, TrainerConfig
from . import quantize
from .context import ModelArtifact, StageContext, write_model
from .draft_benchmark import DraftEvaluation
from .draft_dataset import DraftData
from .draft_init import DraftInitializer
from .train_run import training_dtype

WARMUP, FINAL = 0.05, 0.1
# Steps that a student of each shape is given before shapes are compared.
TRIED_STEPS = 40
# Tokens on which the blocks are compared.
RANKED = 256


class DraftDistillation:
    """One distill stage."""

    def __init__(self, config: DraftConfig, context: StageContext):
        self.config = config
        self.context = context
        self.target = context.load(context.current.model)
        self.digest = weights_digest(self.target.path)
        self.schooling = DraftData(config, context, self.target, self.digest)
        # Now: a sibling that cannot be measured is told of before the training.
        self.judging = DraftEvaluation(self.schooling)

    def run(self) -> ModelArtifact:
        """Leave the draft in draft/ and its figures in logger.json."""
        context = self.context
        students = DraftInitializer(
            self.config.draft_model, context, self.target, self._sample()
        )
        student = students.begin(self._predicted)
        del students
        dense, facts = self._trained(student)
        draft = self._quantized(dense)
        if draft != dense:
            # Acceptance, too, is what the rounded draft has.
            costs = self._costs(draft)
            found = self._expected(context.load(draft).model, costs)
            context.logger.info(f"quantized: {_told(found)}")
            facts |= {"before_quantizing": facts["expected"], "expected": found}
        return self.judging.run(draft, facts)

    def _sample(self) -> mx.array:
        """Tokens [1, L] of answers, to look at the source with."""
        rows = [lesson.tokens.reshape(-1) for lesson in self.schooling.held_out]
        return mx.concatenate(rows)[None, :RANKED]

    def _step(self, folder: Path) -> tuple[TrainStep, LoadedModel]:
        config, loaded = self.config, self.context.load(folder, compute="stored")
        compute = training_dtype("auto", loaded.dtype)
        objective = DraftLoss(
            config.loss, eta=config.eta, cross_entropy=config.ce_weight
        )
        step = TrainStep(
            loaded.model,
            OptimizerConfig(max_grad_norm=1.0),
            compute_dtype=compute,
            chunked_loss=_chunked(loaded),
            teacher_loss=objective,
        )
        set_compute_dtype(loaded.model, compute)
        return step, loaded

    def _predicted(self, folder: Path) -> float:
        """The speed-up to expect of a student after a few steps."""
        costs = self._costs(folder)
        step, _ = self._step(folder)
        steps = min(TRIED_STEPS, self.config.steps)
        for number in range(steps):
            step(self.schooling.lessons(number), self._rate(number, steps), number)
            mx.eval(step.parameters, step.optimizer.state)
        return self._expected(step.materialize(), costs)["predicted_speedup"]

    def _costs(self, folder: Path) -> SpeculationCosts:
        """Of the target and the model in a folder, as they would be served."""
        draft, tried = self.context.load(folder).model, self.schooling.tried
        return measure_speculation_costs(
            self.target.model, draft, prompt_length=mean_prompt_length(tried)
        )

    def _rate(self, number: int, steps: int) -> float:
        return learning_rate_at(
            number,
            steps,
            peak=self.config.learning_rate,
            schedule="cosine",
            warmup_ratio=WARMUP,
            min_lr_ratio=FINAL,
        )

    def _expected(self, model, costs: SpeculationCosts) -> dict:
        """Acceptance on answers held out, and what it would bring."""
        low = high = count = 0.0
        for lesson in self.schooling.held_out:
            mask = np.array(lesson.mask)
            least, most = map(np.array, acceptance_bounds(model, lesson))
            low, high = low + least[mask].sum(), high + most[mask].sum()
            count += mask.sum()
        exam = self.schooling.exam
        curves = [
            predict_accepted_lengths(all_acceptance_probs(texts, model))
            for texts in exam.values()
        ]
        said = [len(text.tokens) - 1 for texts in exam.values() for text in texts]
        curve = np.mean(curves, axis=0).tolist()
        length, speedup = costs.best_draft_length(
            curve, float(np.mean(said)) or math.inf
        )
        return {
            "acceptance_lower_bound": float(low / count),
            "acceptance_upper_bound": float(high / count),
            "accepted_length": curve,
            "num_draft_tokens": length,
            "predicted_speedup": speedup,
        } | {
            f"accepted_length_{name.replace(' ', '_')}": found
            for name, found in zip(exam, curves, strict=True)
        }

    def _trained(self, student: Path) -> tuple[Path, dict]:
        """The folder of the trained draft, and how it was made."""
        costs, logger = self._costs(student), self.context.logger
        step, loaded = self._step(student)

        def tell(done: int) -> None:
            found = self._expected(step.materialize(), costs)
            logger.metrics({"kind": "draft", "step": done} | found)
            logger.info(f"step {done}: {_told(found)}")

        loop = self._loop(step, tell)
        loss = loop.train()
        dense = self.context.folder / "dense"
        weights = dict(tree_flatten(step.materialize().parameters()))
        weights = {k: v.astype(loaded.dtype) for k, v in weights.items()}
        parameters = sum(value.size for value in weights.values())
        write_model(dense, loaded, weights)
        return dense, {
            "parameters": parameters,
            "steps": loop.selected_step,
            "trained_tokens": loop.progress.trained_tokens,
            "validation_loss": loss,
            "expected": self._expected(step.materialize(), costs),
        }

    def _loop(self, step: TrainStep, tell) -> Trainer:
        config = self.config
        return Trainer(
            step,
            self._lessons(step),
            TrainerConfig(
                steps=config.steps,
                seed=self.context.seed,
                checkpoint_dir=self.context.folder / "checkpoints",
                logging_steps=config.logging_steps,
                eval_steps=config.eval_steps,
                save_steps=config.save_steps,
                load_best_at_end=True,
            ),
            learning_rate=lambda number: self._rate(number, config.steps),
            eval_batches=list(self.schooling.held_out),
            logger=self.context.logger,
            on_evaluate=tell,
        )

    def _lessons(self, step: TrainStep) -> DistillationBatches | OnPolicyBatches:
        """What the steps learn, of which some may ask the draft itself."""
        config, lessons = self.config, self.schooling.lessons
        if config.on_policy is None:
            return lessons
        return OnPolicyBatches(
            lessons,
            config.on_policy,
            begin=config.steps - round(config.on_policy.fraction * config.steps),
            folder=self.context.folder / "replays",
            draft=step.materialize,
            stop_tokens=self.schooling.stop_tokens,
            info=self.context.logger.info,
        )

    def _quantized(self, dense: Path) -> Path:
        """The folder of the draft as it will be served."""
        if not self.config.quantization:
            return dense
        place = self.context.folder / "quantization"
        place.mkdir(exist_ok=True)
        context = replace(
            self.context, folder=place, current=ModelArtifact(dense, dense)
        )
        return quantize.run(self.config.quantization, context).model


def _told(expected: dict) -> str:
    length = expected["num_draft_tokens"]
    return (
        f"between {expected['acceptance_lower_bound']:.1%} and "
        f"{expected['acceptance_upper_bound']:.1%} of drawn guesses stand; "
        f"{expected['accepted_length'][length - 1]:.2f} tokens a round and "
        f"{expected['predicted_speedup']:.2f}x predicted with {length} guesses"
    )


def _chunked(loaded: LoadedModel) -> ChunkedLoss | None:
    """The loss of answers alone, by chunks; None where the model does not split."""
    logits = CACHED_LOGITS if on_cpu() else CHUNK_LOGITS
    try:
        chunk = max(64, logits // config_int(loaded.config, "vocab_size"))
        return ChunkedLoss(loaded.model, chunk)
    except ChunkedLossUnsupported:
        return None
