"""Scale tuning: scales and biases trained to predict what the full model predicts.

Codes stay as they are, so nothing has to be rounded but the scales, and every forward
takes them as they are stored (the last phase of EfficientQAT, arXiv 2407.11062, with a
teacher in place of text). A scale moves about the middle of its codes, or it would move
the whole group with it; and every layer moves in units of its mean scale, which makes
one learning rate mean the same for all widths of codes.
"""

import hashlib
import json
from math import prod
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..run.files import atomic_folder
from ..run.report import Report
from ..train.distillation import kl_sum
from ..train.optim import clip, learning_rate
from ..train.targets import Target, Targets
from .student import Student
from .task import Tune

LADDER = (3e-4, 1e-3, 3e-3, 1e-2)
# Steps of a rung, and parts of the held-out tokens that judge it.
PROBE_STEPS, PROBE_PARTS = 12, 2
WARMUP = 0.05
BETAS = [0.9, 0.99]
CLIP = 1.0
EVALUATIONS = 8
STATE = "state.safetensors"
KINDS = ("scales", "biases")


class Tuning:
    """Trains the scales and biases of a student from where it is.

    Args:
        training, held_out: predictions of the unquantized model.
        folder: where the state is kept; a run that was killed goes on from there.
    """

    def __init__(
        self,
        config: Tune,
        student: Student,
        training: Targets,
        held_out: Targets,
        *,
        folder: Path,
        seed: int,
        report: Report,
    ):
        self.config = config
        self.student = student
        self.training = training
        self.held_out = held_out
        self.folder = folder
        self.seed = seed
        self.report = report
        layers = student.affine
        self._shapes = {path: layer.scales.shape for path, layer in layers.items()}
        named = {f"{p}.{k}": m[k] for p, m in layers.items() for k in KINDS}
        # One vector for all layers: a step is a few kernels, however many there are.
        self._start = self._joined(named)
        means = {
            p: mx.abs(layer.scales.astype(mx.float32)).mean()
            for p, layer in layers.items()
        }
        self._units = self._spread(means)
        self._middles = self._spread(
            {p: (2**m.bits - 1) / 2 for p, m in layers.items()}
        )
        self._masters = dict(self._start)
        self._optimizer = optimizers.Adam(0.0, BETAS, bias_correction=True)
        self._reset()
        state = [self._masters, self._optimizer.state]
        self._compiled = mx.compile(self._step, inputs=state, outputs=state)
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
        with self.report.progress(config.steps, "tuning scales") as progress:
            for step in range(done["step"], config.steps):
                loss = self._trained(step, config.steps, done["rate"])
                done["step"] = step + 1
                if done["step"] % every == 0 or done["step"] == config.steps:
                    found = self._judged()
                    if found < done["best"]:
                        self._best = self._stored()
                        done |= {"best": found, "best_step": done["step"]}
                    self._save(done)
                    progress.update(done["step"], loss=loss.item(), held_out_kl=found)
        self.report.say(
            f"tuned scales: step {done['best_step']} of {config.steps} is the best"
            if done["best_step"]
            else "tuned scales: no step was better than the start, which is kept"
        )
        self.student.put(self._best)
        return self._best

    def _probed(self) -> float:
        """The rung of the ladder that leads furthest in a few steps."""
        found = {}
        for rate in LADDER:
            for step in range(PROBE_STEPS):
                self._trained(step, PROBE_STEPS, rate)
            found[rate] = self._judged(PROBE_PARTS)
            self._reset()
        tried = ", ".join(f"{rate:g}: {kl:.4g}" for rate, kl in found.items())
        # What is not a number is never less.
        best = min(
            found, key=lambda rate: (not found[rate] < float("inf"), found[rate])
        )
        self.report.say(f"learning rates tried, held-out KL: {tried}; taking {best:g}")
        return best

    def _trained(self, step: int, steps: int, rate: float) -> mx.array:
        part = self._part(step)
        now = learning_rate(
            step, steps, peak=rate, schedule="cosine", warmup=WARMUP, final=0.0
        )
        tokens, counted = self.training.tokens[part], self.training.counted[part]
        target = self.training[part]
        loss = self._compiled(tokens, counted, *target, mx.array(now))
        mx.async_eval(loss, self._masters, self._optimizer.state)
        return loss

    def _part(self, step: int) -> int:
        """Which part a step trains on; every turn through all has its own order."""
        turn, place = divmod(step, len(self.training))
        random = np.random.default_rng([self.seed, turn])
        return int(random.permutation(len(self.training))[place])

    def _step(self, tokens, counted, indices, log_probs, log_rest, rate) -> mx.array:
        target = Target(indices, log_probs, log_rest)

        def loss_of(served):
            self.student.model.update(tree_unflatten(list(served.items())))
            logits = self.student.model(tokens)
            temperature = self.config.temperature
            return kl_sum(logits, target, counted, temperature=temperature)

        # Straight through the rounding: what the masters get is what is served gets.
        served = self.student.served(self._cut(self._masters))
        loss, found = mx.value_and_grad(loss_of)(served)
        count = counted.sum()
        gradients = self._about_middles(self._joined(found), count)
        norm = mx.sqrt(sum(mx.square(g).sum() for g in gradients.values()))
        self._optimizer.learning_rate = rate
        origin = {k: mx.zeros_like(v) for k, v in gradients.items()}
        moves = self._optimizer.apply_gradients(clip(gradients, norm, CLIP), origin)
        self._move(moves)
        return loss / count

    def _about_middles(self, gradients: dict, count: mx.array) -> dict[str, mx.array]:
        """Gradients of the mean, by steps of one unit; see `_move`."""
        scales, biases = (gradients[kind] * self._units / count for kind in KINDS)
        spread = (scales - self._middles * biases) * 2 / self._middles
        return {"scales": spread, "biases": biases}

    def _move(self, moves: dict[str, mx.array]) -> None:
        """Move the middle of every group by its bias, and spread it by its scale."""
        shift, spread = moves["biases"] * self._units, moves["scales"] * self._units
        spread = spread * 2 / self._middles
        self._masters["scales"] += spread
        self._masters["biases"] += shift - self._middles * spread

    def _joined(self, named: dict[str, mx.array]) -> dict[str, mx.array]:
        """All scales in one float32 vector, and all biases."""
        return {
            kind: mx.concatenate(
                [
                    named[f"{p}.{kind}"].astype(mx.float32).reshape(-1)
                    for p in self._shapes
                ]
            )
            for kind in KINDS
        }

    def _spread(self, values: dict) -> mx.array:
        """A number of every layer, for each of its scales."""
        return mx.concatenate(
            [
                mx.full(prod(shape), values[p], mx.float32)
                for p, shape in self._shapes.items()
            ]
        )

    def _cut(self, joined: dict[str, mx.array]) -> dict[str, mx.array]:
        """What `_joined` made one of, by name."""
        ends = np.cumsum([prod(shape) for shape in self._shapes.values()]).tolist()
        return {
            f"{path}.{kind}": part.reshape(shape)
            for kind in KINDS
            for part, (path, shape) in zip(
                mx.split(joined[kind], ends[:-1]), self._shapes.items(), strict=True
            )
        }

    def _judged(self, parts: int | None = None) -> float:
        self.student.put(self._stored())
        return self.student.divergence(self.held_out, parts)

    def _stored(self) -> dict[str, mx.array]:
        named = self._cut(self._masters)
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
        self.report.say(f"tuning scales: going on at step {done['step']}")
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
