"""Arrays of all layers end to end, so that one kernel works on all of them."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ...config.quantize import ScaleTuningConfig
from ...run.fs import atomic_folder
from ...run.logger import RunLogger
from ...training.distillation import kl_sum
from ...training.schedules import clip_grad_norm, learning_rate_at
from ...training.teacher_cache import PartTargets
from ...training.teacher_targets import TeacherTarget
from .candidates import CandidateModel


class FlatParameters:
    """Between arrays by name, `layer.kind`, and one vector of each kind.

    Args:
        kinds: every layer has an array of each, of the layer's one shape.
        shapes: by layer; vectors have the layers in this order.
    """

    def __init__(self, kinds: Sequence[str], shapes: Mapping[str, tuple[int, ...]]):
        self._kinds = kinds
        self._shapes = shapes
        self._sizes = {path: prod(shape) for path, shape in shapes.items()}

    def joined(self, named: Mapping[str, mx.array]) -> dict[str, mx.array]:
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

    def cut(self, vectors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The arrays that `joined` made these of, by name."""
        ends = list(accumulate(self._sizes.values()))[:-1]
        return {
            f"{path}.{kind}": part.reshape(shape)
            for kind in self._kinds
            for part, (path, shape) in zip(
                mx.split(vectors[kind], ends), self._shapes.items(), strict=True
            )
        }

    def spread(self, values: Mapping[str, mx.array | float]) -> mx.array:
        """A vector [N] with the number of a layer at each of its places."""
        return mx.concatenate(
            [mx.full(size, values[p], mx.float32) for p, size in self._sizes.items()]
        )


# --- from quant.tune: Scale tuning: scales and biases trained to predict what the full model predicts.
#
# Codes stay as they are, so nothing has to be rounded but the scales, and every forward
# takes them as they are stored (the last phase of EfficientQAT, arXiv 2407.11062, with a
# teacher in place of text). A scale moves about the middle of its codes, or it would move
# the whole group with it; and every layer moves in units of its mean scale, which makes
# one learning rate mean the same for all widths of codes.


LADDER = (3e-4, 1e-3, 3e-3, 1e-2)
# Steps of a rung, and parts of the held-out tokens that judge it.
PROBE_STEPS, PROBE_PARTS = 8, 4
WARMUP = 0.05
BETAS = [0.9, 0.99]
CLIP = 1.0
EVALUATIONS = 8
STATE = "state.safetensors"
KINDS = ("scales", "biases")


class ScaleTuner:
    """Trains the scales and biases of a student from where it is.

    Args:
        training, held_out: predictions of the unquantized model.
        folder: where the state is kept; a run that was killed goes on from there.
    """

    def __init__(
        self,
        config: ScaleTuningConfig,
        student: CandidateModel,
        training: PartTargets,
        held_out: PartTargets,
        *,
        folder: Path,
        seed: int,
        logger: RunLogger,
    ):
        self.config = config
        self.student = student
        self.training = training
        self.held_out = held_out
        self.folder = folder
        self.seed = seed
        self.logger = logger
        layers = student.affine
        shapes = {path: layer.scales.shape for path, layer in layers.items()}
        # One vector for all layers: a step is a few kernels, however many there are.
        self._vectors = FlatParameters(KINDS, shapes)
        named = {f"{p}.{k}": m[k] for p, m in layers.items() for k in KINDS}
        self._start = self._vectors.joined(named)
        means = {
            p: mx.abs(layer.scales.astype(mx.float32)).mean()
            for p, layer in layers.items()
        }
        self._units = self._vectors.spread(means)
        self._middles = self._vectors.spread(
            {p: (2**m.bits - 1) / 2 for p, m in layers.items()}
        )
        self._masters = dict(self._start)
        self._optimizer = optimizers.Adam(0.0, BETAS, bias_correction=True)
        self._reset()
        self._sums = self._nothing()
        # As many parts as fill a step, however few tokens go through the model at once.
        parts, size = len(training), sum(tokens.size for tokens in training.tokens)
        self._parts_of_step = min(
            parts, max(1, round(config.batch_tokens / size * parts))
        )
        state = [self._masters, self._optimizer.state, self._sums]
        self._adding = mx.compile(self._add, inputs=state, outputs=state)
        self._moving = mx.compile(self._move, inputs=state, outputs=state)
        mx.eval(self._units, self._middles, state)

    def run(self) -> dict[str, mx.array]:
        """Tune, unless that leads nowhere.

        Returns:
            Scales and biases by name, as they are stored: the best there were on the
            tokens held out, those of the start among them. The student has them.
        """
        done = self._restored()
        if done is None:
            done = {"step": 0, "best": self._judged(), "best_step": 0}
            done["rate"] = self.config.learning_rate or self._probed()
            self._best = self._stored()
        config, every = self.config, max(1, self.config.steps // EVALUATIONS)
        with self.logger.progress(config.steps, "tuning scales") as progress:
            for step in range(done["step"], config.steps):
                loss = self._trained(step, config.steps, done["rate"])
                done["step"] = step + 1
                if done["step"] % every == 0 or done["step"] == config.steps:
                    found = self._judged()
                    if found < done["best"]:
                        self._best = self._stored()
                        done |= {"best": found, "best_step": done["step"]}
                    self._save(done)
                    progress.update(done["step"], loss=loss.item(), eval_kl=found)
        self.logger.info(
            f"tuned scales: step {done['best_step']} of {config.steps} is the best"
            if done["best_step"]
            else "tuned scales: no step was better than the start, which is kept"
        )
        self.student.put(self._best)
        return self._best

    def _probed(self) -> float:
        """The rung of the ladder that leads furthest in a few steps."""
        found: dict[float, float] = {}
        for rate in LADDER:
            for step in range(PROBE_STEPS):
                self._trained(step, PROBE_STEPS, rate)
            divergence = self._judged(PROBE_PARTS)
            found[rate] = math.inf if math.isnan(divergence) else divergence
            self._reset()
            if found[rate] > min(found.values()):
                break  # Higher ones lead further astray.
        tried = ", ".join(f"{rate:g}: {kl:.4g}" for rate, kl in found.items())
        best = min(found, key=found.__getitem__)
        self.logger.info(f"learning rates tried, held-out KL: {tried}; taking {best:g}")
        return best

    def _trained(self, step: int, steps: int, rate: float) -> mx.array:
        now = learning_rate_at(
            step, steps, peak=rate, schedule="cosine", warmup_ratio=WARMUP, min_lr_ratio=0.0
        )
        for part in self._parts(step):
            tokens, counted = self.training.tokens[part], self.training.counted[part]
            self._adding(tokens, counted, *self.training[part])
            mx.async_eval(self._sums)
        loss = self._moving(mx.array(now))
        mx.async_eval(loss, self._masters, self._optimizer.state, self._sums)
        return loss

    def _parts(self, step: int) -> list[int]:
        """What a step trains on; every turn through all parts has its own order."""
        first = step * self._parts_of_step
        return [self._part(n) for n in range(first, first + self._parts_of_step)]

    def _part(self, number: int) -> int:
        turn, place = divmod(number, len(self.training))
        random = np.random.default_rng([self.seed, turn])
        return int(random.permutation(len(self.training))[place])

    def _add(self, tokens, counted, indices, log_probs, log_tail) -> None:
        """Add up gradients of a part: every token of a step counts alike."""
        target = TeacherTarget(indices, log_probs, log_tail)

        def loss_of(served):
            self.student.model.update(tree_unflatten(list(served.items())))
            logits = self.student.model(tokens)
            temperature = self.config.temperature
            return kl_sum(logits, target, counted, temperature=temperature)

        # Straight through the rounding: what the masters get is what is served gets.
        served = self.student.served(self._vectors.cut(self._masters))
        loss, found = mx.value_and_grad(loss_of)(served)
        found = self._vectors.joined(found) | {"loss": loss, "count": counted.sum()}
        for name, value in found.items():
            self._sums[name] += value

    def _move(self, rate: mx.array) -> mx.array:
        """A step by what was added up; the mean loss."""
        loss, count = self._sums["loss"], self._sums["count"]
        gradients = self._about_middles(count)
        norm = mx.sqrt(sum(mx.square(g).sum() for g in gradients.values()))
        self._optimizer.learning_rate = rate
        origin = {k: mx.zeros_like(v) for k, v in gradients.items()}
        moves = self._optimizer.apply_gradients(
            clip_grad_norm(gradients, norm, CLIP), origin
        )
        # The middle of every group moves by its bias, and its scale spreads it.
        shift, spread = moves["biases"] * self._units, moves["scales"] * self._units
        spread = spread * 2 / self._middles
        self._masters["scales"] += spread
        self._masters["biases"] += shift - self._middles * spread
        self._sums.update(self._nothing())
        return loss / count

    def _about_middles(self, count: mx.array) -> dict[str, mx.array]:
        """Gradients of the mean, by steps of one unit."""
        scales, biases = (self._sums[kind] * self._units / count for kind in KINDS)
        spread = (scales - self._middles * biases) * 2 / self._middles
        return {"scales": spread, "biases": biases}

    def _nothing(self) -> dict[str, mx.array]:
        """Sums before the first part of a step."""
        zeros = {kind: mx.zeros_like(value) for kind, value in self._start.items()}
        return zeros | {"loss": mx.array(0.0), "count": mx.array(0)}

    def _judged(self, parts: int | None = None) -> float:
        self.student.put(self._stored())
        return self.student.divergence(self.held_out, parts)

    def _stored(self) -> dict[str, mx.array]:
        named = self._vectors.cut(self._masters)
        return {k: v.astype(self.student.dtype) for k, v in named.items()}

    def _reset(self) -> None:
        # In place: the compiled step holds on to these very dictionaries.
        self._masters.update(self._start)
        blank = {name: {} for name in self._start}
        self._optimizer.state.update(blank, step=mx.array(0, mx.uint64))
        self._optimizer.init(self._start)

    def _save(self, done: dict) -> None:
        with atomic_folder(self.folder) as partial:
            metadata = {"done": json.dumps(done), "key": self._key()}
            path = str(partial / STATE)
            mx.save_safetensors(path, self._tensors(), metadata=metadata)

    def _restored(self) -> dict | None:
        """Put the newest state in place; how far it was, None if there is none."""
        path = self.folder / STATE
        if not path.is_file():
            return None
        tensors, metadata = mx.load(str(path), return_metadata=True)
        if metadata["key"] != self._key():
            return None
        done = json.loads(metadata["done"])
        own: dict[str, dict] = {"masters": {}, "best": {}, "optimizer": {}}
        for name, value in tensors.items():
            kind, _, rest = name.partition(":")
            own[kind][rest] = value
        self._masters.update(own["masters"])
        self._best = own["best"]
        self._optimizer.state.update(_nested(self._optimizer.state, own["optimizer"]))
        mx.eval(own)
        self.logger.info(f"tuning scales: going on at step {done['step']}")
        return done

    def _tensors(self) -> dict[str, mx.array]:
        kinds = {
            "masters": self._masters,
            "best": self._best,
            "optimizer": dict(tree_flatten(self._optimizer.state)),
        }
        return {f"{k}:{n}": v for k, values in kinds.items() for n, v in values.items()}

    def _key(self) -> str:
        """What the state depends on."""
        settings = [self.config.model_dump(), self.seed]
        settings += [self.training.key, self.held_out.key]
        key = hashlib.sha256(json.dumps(settings).encode())
        for value in self._start.values():
            key.update(memoryview(value))
        return key.hexdigest()


def _nested(state: dict, flat: dict[str, mx.array], prefix: str = "") -> dict:
    """Flat names as the keys of `state`, which may have dots themselves."""
    return {
        k: _nested(v, flat, f"{prefix}{k}.")
        if isinstance(v, dict)
        else flat[prefix + str(k)]
        for k, v in state.items()
    }
