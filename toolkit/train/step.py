"""One optimizer step, compiled: masters in float32, the loss per trained token."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_unflatten

from ..data.batches import Batch
from ..model.fake_quant import FakeQuant
from .losses import cross_entropy_sum
from .optim import clip, decay


class Step:
    """The trained parameters of a model and the compiled step that improves them.

    The model itself is only the function: before every forward its trained weights are
    set from the float32 masters, cast to the compute type and, in quantization-aware
    training, rounded as the export will round them.

    Args:
        model: with everything that is not trained frozen.
        compute: type of the forward and backward pass.
        fake_quant: the rounding to train with, or None.
        gradient_clip: largest joint gradient norm, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compute: mx.Dtype = mx.float32,
        fake_quant: FakeQuant | None = None,
        beta1: float = 0.9,
        beta2: float = 0.95,
        weight_decay: float = 0.0,
        gradient_clip: float | None = None,
    ):
        self.model = model
        self.compute = compute
        self.fake_quant = fake_quant
        self.weight_decay = weight_decay
        # What a parameter's learning rate is multiplied by, where it is not 1.
        self.rates: dict[str, float] = {}
        self.gradient_clip = gradient_clip
        self.parameters = {
            path: value.astype(mx.float32)
            for path, value in tree_flatten(model.trainable_parameters())
        }
        self.optimizer = optimizers.Adam(
            learning_rate=0.0, betas=[beta1, beta2], bias_correction=True
        )
        self.optimizer.init(self.parameters)
        mx.eval(self.parameters, self.optimizer.state)
        self._train = self._compile(self._update, writes=True)
        self._evaluate = self._compile(self._loss, writes=False)

    def __call__(self, batch: Batch, rate: float, seed: int) -> tuple[mx.array, ...]:
        """Train on a batch.

        Args:
            rate: the learning rate.
            seed: of everything random in this step, so that a resumed run draws alike.

        Returns:
            Summed loss, trained tokens and gradient norm, not yet computed.
        """
        mx.random.seed(seed)
        self.model.train()
        return self._train(batch.tokens, batch.mask, mx.array(rate))

    def evaluate(self, batches) -> tuple[float, int]:
        """Summed loss and trained tokens over batches, dropout off."""
        self.model.eval()
        loss = tokens = 0.0
        for batch in batches:
            loss += self._evaluate(batch.tokens, batch.mask).item()
            tokens += batch.mask.sum().item()
        return loss, int(tokens)

    def serve(self) -> nn.Module:
        """The model with the weights of the next forward in place, dropout off."""
        self._set(self.parameters)
        return self.model.eval()

    def _compile(self, function, *, writes: bool):
        # `Adam.state` and the random state are replaced leaf by leaf, in place.
        state = [self.parameters, self.optimizer.state, mx.random.state]
        return mx.compile(function, inputs=state, outputs=state if writes else None)

    def _set(self, parameters: dict[str, mx.array]) -> None:
        weights = {k: v.astype(self.compute) for k, v in parameters.items()}
        if self.fake_quant:
            weights |= self.fake_quant.served(parameters, self.compute)
        self.model.update(tree_unflatten(list(weights.items())))

    def _loss(self, tokens: mx.array, mask: mx.array) -> mx.array:
        return self._loss_of(self.parameters, tokens, mask)

    def _loss_of(self, parameters, tokens: mx.array, mask: mx.array) -> mx.array:
        self._set(parameters)
        return cross_entropy_sum(self.model(tokens[:, :-1]), tokens[:, 1:], mask)

    def _update(self, tokens: mx.array, mask: mx.array, rate: mx.array):
        loss, gradients = mx.value_and_grad(self._loss_of)(
            self.parameters, tokens, mask
        )
        trained = mx.maximum(mask.sum(), 1)
        gradients = {k: g / trained for k, g in gradients.items()}
        gradients, norm = clip(gradients, self.gradient_clip)
        self.optimizer.learning_rate = rate
        decayed = decay(self.parameters, rate, self.weight_decay)
        stepped = self.optimizer.apply_gradients(gradients, decayed)
        for name, ratio in self.rates.items():
            old = self.parameters[name]
            stepped[name] = old + ratio * (stepped[name] - old)
        self.parameters.update(stepped)
        return loss, trained, norm
