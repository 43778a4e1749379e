"""Scale tuning: train scales and biases towards the predictions of the full model.

Codes stay fixed, and every forward pass uses scales and biases as they are stored. This
is the last phase of EfficientQAT (E2E-QP, arXiv 2407.11062) with a teacher instead of
text.
"""

import hashlib
import json
import math

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np

from ...config.quantize import ScaleTuningConfig
from ...config.train import TeacherConfig
from ...cpu.memory import limited_cache
from ...data.batching import Batch
from ...files.artifacts import ArtifactStore
from ...interfaces import Logger
from ...training import checkpoint
from ...training.checkpoint import TrainingProgress
from ...training.distillation import DistillationLoss
from ...training.optimizers import OptimizerConfig
from ...training.schedules import clip_grad_norm, learning_rate_at
from ...training.step import TrainStep
from ...training.teacher_cache import PartTargets
from .candidates import CandidateModel

PROBE_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
# Steps with each probed learning rate, and held-out parts that evaluate it.
PROBE_STEPS, PROBE_PARTS = 8, 4
WARMUP_RATIO = 0.05
BETAS = [0.9, 0.99]
MAX_GRAD_NORM = 1.0
EVALUATIONS = 8
# Artifacts: the learning rate that was found, and the folder of the checkpoints.
KIND, RATE = "scale_tuning", "learning_rate"
KINDS = ("scales", "biases")


class SpreadAndMiddle(optimizers.Adam):
    """Adam for the spread and the middle of the codes of every group.

    A scale moves about the middle of its codes, because it would otherwise shift its
    whole group. Every layer moves in units of its mean scale, so that one learning rate
    has the same meaning for all bit widths.

    Args:
        layers: with scales and biases, by path.
    """

    def __init__(self, layers: dict[str, nn.Module]):
        super().__init__(0.0, BETAS, bias_correction=True)
        self._units = {
            path: mx.abs(layer.scales.astype(mx.float32)).mean()
            for path, layer in layers.items()
        }
        self._middles = {path: (2**m.bits - 1) / 2 for path, m in layers.items()}
        mx.eval(self._units)

    def apply_gradients(self, gradients: dict, parameters: dict) -> dict:
        """The updated scales and biases by name, `path.scales` and `path.biases`."""
        moved = {}
        for path, unit in self._units.items():
            middle = self._middles[path]
            scales, biases = (gradients[f"{path}.{kind}"] * unit for kind in KINDS)
            moved[f"{path}.scales"] = (scales - middle * biases) * 2 / middle
            moved[f"{path}.biases"] = biases
        norm = mx.sqrt(sum(mx.square(g).sum() for g in moved.values()))
        moves = super().apply_gradients(
            clip_grad_norm(moved, norm, MAX_GRAD_NORM),
            {name: mx.zeros_like(value) for name, value in moved.items()},
        )
        updated = {}
        for path, unit in self._units.items():
            spread, shift = (moves[f"{path}.{kind}"] * unit for kind in KINDS)
            spread = spread * 2 / self._middles[path]
            # The bias moves the middle of a group, the scale spreads it about that.
            shift = shift - self._middles[path] * spread
            for kind, change in zip(KINDS, (spread, shift), strict=True):
                updated[f"{path}.{kind}"] = parameters[f"{path}.{kind}"] + change
        return updated


class ScaleTuner:
    """Trains the scales and biases of a model from their current values.

    Args:
        training, held_out: predictions of the unquantized model.
        store: for the state, which rank 0 has. A killed run resumes from it.
    """

    def __init__(
        self,
        config: ScaleTuningConfig,
        model: CandidateModel,
        training: PartTargets,
        held_out: PartTargets,
        *,
        store: ArtifactStore,
        seed: int,
        logger: Logger,
    ):
        self.config = config
        self.model = model
        self.ranks = model.ranks
        self.training = training
        self.held_out = held_out
        self.store = store
        self.seed = seed
        self.logger = logger
        for layer in model.affine_layers.values():
            # Quantized layers refuse to be unfrozen.
            nn.Module.unfreeze(layer, recurse=False, keys=[*KINDS])
        self._initial = {
            f"{path}.{kind}": layer[kind].astype(model.dtype)
            for path, layer in model.affine_layers.items()
            for kind in KINDS
        }
        # The parts of a step. A part is what goes through the model at once.
        parts, size = len(training), sum(tokens.size for tokens in training.tokens)
        parts_per_step = round(config.batch_tokens / size * parts)
        self._parts_per_step = min(parts, max(1, parts_per_step))
        settings = [config.model_dump(), seed, training.key, held_out.key]
        key = hashlib.sha256(json.dumps(settings).encode())
        for value in self._initial.values():
            key.update(memoryview(value.astype(mx.float32)))
        self._folder = store.root / KIND / key.hexdigest()

    @limited_cache()
    def run(self) -> dict[str, mx.array]:
        """Tune and keep the best scales and biases on held-out tokens.

        Returns:
            They by name, as they are stored. The initial ones are among the candidates.
            The model has them afterwards.
        """
        steps, step = self.config.steps, self._new_step()
        state = checkpoint.restore(self._folder, step, self.logger.warning)
        best = self._initial
        if state.best_step:
            kept = self._new_step()
            if checkpoint.load_weights(self._folder, kept, state.best_step):
                best = self._stored(kept)
            else:
                self.logger.warning(f"{self._folder}: damaged, made again")
                step, state = kept, TrainingProgress()
        if state.step:
            self.logger.info(f"scale tuning: resuming at step {state.step}")
        else:
            state.add_evaluation(self._evaluate(step))
        rate = self.config.learning_rate or self._learning_rate()
        interval = max(1, steps // EVALUATIONS)
        with self.logger.progress(steps, "tuning scales") as bar:
            for number in range(state.step, steps):
                loss = self._train_step(step, number, steps, rate)
                bar.advance()
                state.step = number + 1
                if state.step % interval == 0 or state.step == steps:
                    divergence = self._evaluate(step)
                    state.add_evaluation(divergence)
                    if state.best_step == state.step:
                        best = self._stored(step)
                    self._save(step, state)
                    bar.update(state.step, loss=loss.item(), eval_kl=divergence)
        self.logger.info(
            f"scale tuning: step {state.best_step} of {steps} is the best"
            if state.best_step
            else "scale tuning: no step improved the held-out KL, keeping the start"
        )
        self.model.set_tensors(best)
        return best

    def _new_step(self) -> TrainStep:
        """A step that begins with the initial scales and biases."""
        self.model.set_tensors(self._initial)
        layers = self.model.affine_layers
        largest = max(tokens.size for tokens in self.training.tokens)
        return TrainStep(
            self.model.model,
            OptimizerConfig(make=lambda: SpreadAndMiddle(layers)),
            stored_dtypes=dict.fromkeys(self._initial, self.model.dtype),
            compute_dtype=next(iter(layers.values())).scales.dtype,
            loss=DistillationLoss(TeacherConfig()),
            loss_model=self.model.loss_model(trained_tokens=largest),
            ranks=self.ranks,
        )

    def _learning_rate(self) -> float:
        """The learning rate that gives the least held-out KL after a few steps."""
        store = ArtifactStore(self._folder, self.logger.warning, self.ranks)
        if known := store.find_on_first(RATE, RATE):
            return known.facts["rate"]
        divergences: dict[float, float] = {}
        for rate in PROBE_RATES:
            step = self._new_step()
            with self.logger.progress(PROBE_STEPS, f"trying {rate:g}") as bar:
                for number in range(PROBE_STEPS):
                    self._train_step(step, number, PROBE_STEPS, rate)
                    bar.advance()
            divergence = self._evaluate(step, PROBE_PARTS)
            divergences[rate] = math.inf if math.isnan(divergence) else divergence
            if divergences[rate] > min(divergences.values()):
                break  # Higher learning rates are worse still.
        line = ", ".join(f"{rate:g}: {kl:.4g}" for rate, kl in divergences.items())
        best = min(divergences, key=divergences.__getitem__)
        self.logger.info(f"held-out KL by learning rate: {line}; using {best:g}")
        if self.ranks.is_first:
            store.put(RATE, RATE, lambda _: {"rate": best})
        return best

    def _train_step(
        self, step: TrainStep, number: int, steps: int, rate: float
    ) -> mx.array:
        """Train on the parts of a step; returns the mean loss."""
        learning_rate = learning_rate_at(
            number,
            steps,
            peak=rate,
            schedule="cosine",
            warmup_ratio=WARMUP_RATIO,
            min_lr_ratio=0.0,
        )
        output = step(self._batches(number), learning_rate, seed=0)
        loss = output.loss_sum / output.loss_count
        mx.async_eval(loss, step.parameters, step.optimizer.state)
        return loss

    def _batches(self, number: int) -> list[Batch]:
        """The parts of a step. Every epoch has its own order."""
        batches, first = [], number * self._parts_per_step
        for index in range(first, first + self._parts_per_step):
            epoch, place = divmod(index, len(self.training))
            random = np.random.default_rng([self.seed, epoch])
            order = random.permutation(len(self.training))
            batches.append(self.training.batch(int(order[place])))
        return batches

    def _evaluate(self, step: TrainStep, num_parts: int | None = None) -> float:
        self.model.set_tensors(self._stored(step))
        return self.model.divergence(self.held_out, num_parts, logger=self.logger)

    def _stored(self, step: TrainStep) -> dict[str, mx.array]:
        return {k: v.astype(self.model.dtype) for k, v in step.parameters.items()}

    def _save(self, step: TrainStep, state: TrainingProgress) -> None:
        checkpoint.save(
            self._folder, step, state, save_total_limit=1, best_step=state.best_step
        )
