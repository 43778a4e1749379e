"""Scale tuning: train scales and biases towards the predictions of the full model.

Codes stay fixed, and every forward pass uses scales and biases as they are stored. This
is the last phase of EfficientQAT (E2E-QP, arXiv 2407.11062) with a teacher instead of
text. A scale moves about the middle of its codes, because it would otherwise shift its
whole group. Every layer moves in units of its mean scale, so that one learning rate has
the same meaning for all bit widths.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ...config.quantize import ScaleTuningConfig
from ...files.artifacts import ArtifactStore
from ...interfaces import Logger
from ...training.schedules import clip_grad_norm, learning_rate_at
from ...training.teacher_cache import PartTargets
from ...training.teacher_targets import TeacherTarget
from .candidates import CandidateModel, TeacherDivergence

PROBE_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
# Steps with each probed learning rate, and held-out parts that evaluate it.
PROBE_STEPS, PROBE_PARTS = 8, 4
WARMUP_RATIO = 0.05
BETAS = [0.9, 0.99]
MAX_GRAD_NORM = 1.0
EVALUATIONS = 8
KIND, FILE = "scale_tuning", "state.safetensors"
KINDS = ("scales", "biases")


class FlatParameters:
    """Converts between arrays by name, `layer.kind`, and one vector of each kind.

    One kernel can then work on the arrays of all layers.

    Args:
        kinds: every layer has an array of each kind, all of the layer's one shape.
        shapes: by layer. Vectors have the layers in this order.
    """

    def __init__(self, kinds: Sequence[str], shapes: Mapping[str, tuple[int, ...]]):
        self._kinds = kinds
        self._shapes = shapes
        self._sizes = {path: prod(shape) for path, shape in shapes.items()}

    def flatten(self, named: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """One float32 vector [N] of each kind."""
        return {
            kind: mx.concatenate(
                [
                    named[f"{p}.{kind}"].astype(mx.float32).reshape(-1)
                    for p in self._shapes
                ]
            )
            for kind in self._kinds
        }

    def unflatten(self, vectors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The arrays of these vectors by name."""
        ends = list(accumulate(self._sizes.values()))[:-1]
        return {
            f"{path}.{kind}": part.reshape(shape)
            for kind in self._kinds
            for part, (path, shape) in zip(
                mx.split(vectors[kind], ends), self._shapes.items(), strict=True
            )
        }

    def broadcast(self, values: Mapping[str, mx.array | float]) -> mx.array:
        """A vector [N] with the value of its layer at every place."""
        return mx.concatenate(
            [mx.full(size, values[p], mx.float32) for p, size in self._sizes.items()]
        )


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
        self._initial = self._init_masters()
        names = self._flat.unflatten(self._initial)
        self._divergence = TeacherDivergence(self.model.model, names)
        self._masters = dict(self._initial)
        self._optimizer = optimizers.Adam(0.0, BETAS, bias_correction=True)
        self._reset()
        self._sums = self._zero_sums()
        # The parts of a step. A part is what goes through the model at once.
        parts, size = len(training), sum(tokens.size for tokens in training.tokens)
        parts_per_step = round(config.batch_tokens / size * parts)
        self._parts_per_step = min(parts, max(1, parts_per_step))
        state = [self._masters, self._optimizer.state, self._sums]
        self._accumulate = mx.compile(self._add, inputs=state, outputs=state)
        self._apply = mx.compile(self._update, inputs=state, outputs=state)
        mx.eval(state)

    def _init_masters(self) -> dict[str, mx.array]:
        """The initial values by kind, float32 [N], in the order of `_flat`."""
        layers = self.model.affine_layers
        shapes = {path: layer.scales.shape for path, layer in layers.items()}
        self._flat = FlatParameters(KINDS, shapes)
        means = {
            p: mx.abs(layer.scales.astype(mx.float32)).mean()
            for p, layer in layers.items()
        }
        self._units = self._flat.broadcast(means)
        self._middles = self._flat.broadcast(
            {p: (2**m.bits - 1) / 2 for p, m in layers.items()}
        )
        mx.eval(self._units, self._middles)
        named = {f"{p}.{k}": m[k] for p, m in layers.items() for k in KINDS}
        return self._flat.flatten(named)

    def run(self) -> dict[str, mx.array]:
        """Tune and keep the best scales and biases on held-out tokens.

        Returns:
            They by name, as they are stored. The initial ones are among the candidates.
            The model has them afterwards.
        """
        state = self._load()
        if state is None:
            state = {"step": 0, "best": self._evaluate(), "best_step": 0}
            state["rate"] = self.config.learning_rate or self._probe_learning_rate()
            self._best = self._stored()
        steps = self.config.steps
        interval = max(1, steps // EVALUATIONS)
        with self.logger.progress(steps, "tuning scales") as progress:
            for step in range(state["step"], steps):
                loss = self._train_step(step, steps, state["rate"])
                progress.advance()
                state["step"] = step + 1
                if state["step"] % interval == 0 or state["step"] == steps:
                    divergence = self._evaluate()
                    if divergence < state["best"]:
                        self._best = self._stored()
                        state |= {"best": divergence, "best_step": state["step"]}
                    self._save(state)
                    progress.update(state["step"], loss=loss.item(), eval_kl=divergence)
        self.logger.info(
            f"scale tuning: step {state['best_step']} of {steps} is the best"
            if state["best_step"]
            else "scale tuning: no step improved the held-out KL, keeping the start"
        )
        self.model.set_tensors(self._best)
        return self._best

    def _probe_learning_rate(self) -> float:
        """The learning rate that gives the least held-out KL after a few steps."""
        divergences: dict[float, float] = {}
        for rate in PROBE_RATES:
            with self.logger.progress(PROBE_STEPS, f"trying {rate:g}") as progress:
                for step in range(PROBE_STEPS):
                    self._train_step(step, PROBE_STEPS, rate)
                    progress.advance()
            divergence = self._evaluate(PROBE_PARTS)
            divergences[rate] = math.inf if math.isnan(divergence) else divergence
            self._reset()
            if divergences[rate] > min(divergences.values()):
                break  # Higher learning rates are worse still.
        line = ", ".join(f"{rate:g}: {kl:.4g}" for rate, kl in divergences.items())
        best = min(divergences, key=divergences.__getitem__)
        self.logger.info(f"held-out KL by learning rate: {line}; using {best:g}")
        return best

    def _train_step(self, step: int, steps: int, rate: float) -> mx.array:
        learning_rate = learning_rate_at(
            step,
            steps,
            peak=rate,
            schedule="cosine",
            warmup_ratio=WARMUP_RATIO,
            min_lr_ratio=0.0,
        )
        for part in self.ranks.shard(self._parts(step)):
            tokens = self.training.tokens[part]
            counted = self.training.counted[part]
            self._accumulate(tokens, counted, *self.training[part])
            mx.async_eval(self._sums)
        self._sum_over_ranks()
        loss = self._apply(mx.array(learning_rate))
        mx.async_eval(loss, self._masters, self._optimizer.state, self._sums)
        return loss

    def _sum_over_ranks(self) -> None:
        """Add the gradients of the other processes."""
        if self.ranks.size == 1:
            return
        totals = self.ranks.all_sum(list(self._sums.values()))
        mx.eval(totals)
        for (name, value), total in zip(self._sums.items(), totals, strict=True):
            self._sums[name] = total.astype(value.dtype)

    def _parts(self, step: int) -> list[int]:
        """The parts of a step. Every epoch has its own order."""
        first = step * self._parts_per_step
        return [self._part(n) for n in range(first, first + self._parts_per_step)]

    def _part(self, number: int) -> int:
        epoch, place = divmod(number, len(self.training))
        random = np.random.default_rng([self.seed, epoch])
        return int(random.permutation(len(self.training))[place])

    def _add(self, tokens, counted, indices, log_probs, log_tail) -> None:
        """Add the gradients of a part. Every token of a step has the same weight."""
        target = TeacherTarget(indices, log_probs, log_tail)

        def loss() -> mx.array:
            return self._divergence(tokens, counted, target)

        loss, gradients = self._value_and_grad(loss)
        sums = gradients | {"loss": loss, "count": counted.sum()}
        for name, value in sums.items():
            self._sums[name] += value

    def _value_and_grad(self, loss: Callable) -> tuple[mx.array, dict]:
        """The loss of the model with the stored masters, and its gradients by kind."""

        def loss_of_values(values):
            self.model.model.update(tree_unflatten(list(values.items())))
            return loss()

        # Straight-through: masters get the gradients of their rounded values.
        values = self.model.forward_values(self._flat.unflatten(self._masters))
        loss, gradients = mx.value_and_grad(loss_of_values)(values)
        return loss, self._flat.flatten(gradients)

    def _update(self, learning_rate: mx.array) -> mx.array:
        """Apply the accumulated gradients; returns the mean loss."""
        loss, count = self._sums["loss"], self._sums["count"]
        gradients = self._gradients(count)
        norm = mx.sqrt(sum(mx.square(g).sum() for g in gradients.values()))
        self._optimizer.learning_rate = learning_rate
        origin = {k: mx.zeros_like(v) for k, v in gradients.items()}
        moves = self._optimizer.apply_gradients(
            clip_grad_norm(gradients, norm, MAX_GRAD_NORM), origin
        )
        self._move(moves)
        self._sums.update(self._zero_sums())
        return loss / count

    def _move(self, moves: dict[str, mx.array]) -> None:
        # The bias moves the middle of a group, the scale spreads the group about it.
        shift, spread = moves["biases"] * self._units, moves["scales"] * self._units
        spread = spread * 2 / self._middles
        self._masters["scales"] += spread
        self._masters["biases"] += shift - self._middles * spread

    def _gradients(self, count: mx.array) -> dict[str, mx.array]:
        """Mean gradients with respect to the spread and middle of groups, in units."""
        scales, biases = (self._sums[kind] * self._units / count for kind in KINDS)
        spread = (scales - self._middles * biases) * 2 / self._middles
        return {"scales": spread, "biases": biases}

    def _zero_sums(self) -> dict[str, mx.array]:
        zeros = {kind: mx.zeros_like(value) for kind, value in self._initial.items()}
        return zeros | {"loss": mx.array(0.0), "count": mx.array(0)}

    def _evaluate(self, num_parts: int | None = None) -> float:
        self.model.set_tensors(self._stored())
        return self.model.divergence(self.held_out, num_parts, logger=self.logger)

    def _stored(self) -> dict[str, mx.array]:
        named = self._flat.unflatten(self._masters)
        return {k: v.astype(self.model.dtype) for k, v in named.items()}

    def _reset(self) -> None:
        # In place, because the compiled step refers to these dictionaries.
        self._masters.update(self._initial)
        blank = {name: {} for name in self._initial}
        self._optimizer.state.update(blank, step=mx.array(0, mx.uint64))
        self._optimizer.init(self._initial)

    def _save(self, state: dict) -> None:
        def write(folder: Path) -> dict:
            mx.save_safetensors(str(folder / FILE), self._tensors())
            return state

        if self.ranks.is_first:
            self.store.put(KIND, self._key(), write)

    def _load(self) -> dict | None:
        """Restore the saved state. None if there is none with this key."""
        known = self.store.find_on_first(KIND, self._key())
        if known is None:
            return None
        tensors = {}
        if self.ranks.is_first:
            tensors = mx.load(str(known.folder / FILE))
        self._restore(self.ranks.exchange(tensors))
        self.logger.info(f"scale tuning: resuming at step {known.facts['step']}")
        return known.facts

    def _restore(self, tensors: Mapping[str, mx.array]) -> None:
        loaded: dict[str, dict] = {"masters": {}, "best": {}, "optimizer": {}}
        for name, value in tensors.items():
            kind, _, key = name.partition(":")
            loaded[kind][key] = value
        self._masters.update(loaded["masters"])
        self._best = loaded["best"]
        optimizer_state = _nest(self._optimizer.state, loaded["optimizer"])
        self._optimizer.state.update(optimizer_state)
        mx.eval(loaded)

    def _tensors(self) -> dict[str, mx.array]:
        kinds = {
            "masters": self._masters,
            "best": self._best,
            "optimizer": dict(tree_flatten(self._optimizer.state)),
        }
        return {f"{k}:{n}": v for k, values in kinds.items() for n, v in values.items()}

    def _key(self) -> str:
        """Digest of everything that the state depends on."""
        settings = [self.config.model_dump(), self.seed]
        settings += [self.training.key, self.held_out.key]
        key = hashlib.sha256(json.dumps(settings).encode())
        for value in self._initial.values():
            key.update(memoryview(value))
        return key.hexdigest()


def _nest(state: dict, flat: dict[str, mx.array], prefix: str = "") -> dict:
    """Flat names as the keys of `state`, which may contain dots themselves."""
    return {
        k: _nest(v, flat, f"{prefix}{k}.")
        if isinstance(v, dict)
        else flat[prefix + str(k)]
        for k, v in state.items()
    }
