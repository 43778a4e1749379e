"""A process's rows of a batch, when several train together."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..data.batching import Batch
from ..errors import UserError
from ..models.hooks import find_blocks
from ..quantization.qat.fake_quant import FakeQuant
from ..run.distributed import SINGLE_PROCESS, ProcessGroup
from .chunked_loss import ChunkedLoss
from .distillation import DistillationLoss
from .document_mask import DocumentCaches
from .fsdp import ShardedParameters
from .gradient_checkpointing import checkpointed
from .losses import cross_entropy_sum
from .optimizers import make_optimizer
from .schedules import clip_grad_norm, decay_weights


def local_rows(batch: Batch, ranks: ProcessGroup) -> Batch:
    """Every `size`-th row of a batch; as many for every process.

    Who has a row less than others gets one whose mask is empty.
    """
    if ranks.size == 1:
        return batch
    arrays = [
        value if value is None else _local_values(value, ranks)
        for value in batch.arrays
    ]
    where = tuple(ranks.shard(batch.where))
    target = batch.target and tuple(
        _local_values(value, ranks) for value in batch.target
    )
    return Batch(arrays[0], arrays[1], where, arrays[2], target=target)


def _local_values(values: mx.array, ranks: ProcessGroup) -> mx.array:
    rows = values[ranks.rank :: ranks.size]
    missing = -(-len(values) // ranks.size) - len(rows)
    return mx.pad(rows, [(0, missing), *[(0, 0)] * (rows.ndim - 1)])


# --- from train.untrainable: What goes wrong when a step is traced, in our words.


@contextmanager
def translate_trace_errors() -> Iterator[None]:
    """Nothing is computed yet: what goes wrong in a trace is the model's fault."""
    try:
        yield
    except (RuntimeError, ValueError, AttributeError) as error:
        raise UserError(
            f"this architecture cannot be trained here: {str(error).splitlines()[0]}",
            hint="its code in mlx-lm has no gradient, or reads an adapted layer's "
            "weight itself; adapter.layers: auto leaves such layers out",
        ) from error


# --- from train.step: One optimizer step, compiled: masters in float32, the loss per trained token.


class TrainStep:
    """The trained parameters of a model and the compiled step that improves them.

    The model itself is only the function: before every forward its trained weights are
    set from the float32 masters, cast to the compute type and, in quantization-aware
    training, rounded as the export will round them.

    Args:
        model: with everything that is not trained frozen.
        compute: type of the forward and backward pass.
        fake_quant: the rounding to train with, or None.
        optimizer: its name; see `make_optimizer`.
        max_grad_norm: largest joint gradient norm, or None.
        gradient_checkpointing: keep only what goes in and out of every block.
        chunked: the loss without full logits, or None for the plain one.
        caches: keep attention inside the documents of packed batches; None = no batch
            is packed.
        taught: the loss against a teacher, or None for that of the tokens alone.
        ranks: the processes that train this model, each on its rows of every batch.
        shard: every process keeps its share alone of parameters, gradients and moments;
            not with a rounding, nor with "adafactor" or "muon".

    Raises:
        UserError: gradient checkpointing of a model without blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compute: mx.Dtype = mx.float32,
        fake_quant: FakeQuant | None = None,
        optimizer: str = "adamw",
        beta1: float = 0.9,
        beta2: float = 0.95,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        gradient_checkpointing: bool = False,
        chunked: ChunkedLoss | None = None,
        caches: DocumentCaches | None = None,
        taught: DistillationLoss | None = None,
        ranks: ProcessGroup = SINGLE_PROCESS,
        shard: bool = False,
    ):
        self.model = model
        self.compute = compute
        self.fake_quant = fake_quant
        self.weight_decay = weight_decay
        # What a parameter's learning rate is multiplied by, where it is not 1.
        self.rates: dict[str, float] = {}
        self.max_grad_norm, self.chunked = max_grad_norm, chunked
        self.caches, self.taught = caches, taught
        self.ranks = ranks
        blocks = find_blocks(model)
        if gradient_checkpointing and blocks is None:
            raise UserError(
                "this model has no list of blocks to run twice",
                hint="gradient_checkpointing: false",
            )
        self._recomputed = blocks if gradient_checkpointing else None
        named = dict(tree_flatten(model.trainable_parameters()))
        if fake_quant:
            # Weights that are made of others are no masters; those others are.
            named = {
                k: v for k, v in named.items() if k not in fake_quant.derived_weights
            }
            named |= fake_quant.qparams
        self.shards = ShardedParameters(
            named if shard else {}, ranks, compute=compute, blocks=blocks
        )
        self.parameters = {
            path: self.shards.cut(path, value).astype(mx.float32)
            for path, value in named.items()
        }
        self.optimizer = make_optimizer(
            optimizer,
            self.parameters,
            beta1=beta1,
            beta2=beta2,
            momentum=momentum,
            blocks=blocks.prefix if blocks else "layers.",
        )
        # Of the micro-batches of a step so far; empty between steps.
        self._sums: dict[str, mx.array] = {}
        mx.eval(self.parameters, self.optimizer.state)
        self._compile()

    def _compile(self) -> None:
        state = [self.parameters, self.optimizer.state, mx.random.state]
        summing = [self._sums, mx.random.state]
        self._train = mx.compile(self._update, inputs=state, outputs=state)
        self._add = mx.compile(self._sum, inputs=[*state, self._sums], outputs=summing)
        self._finish = mx.compile(
            self._improve, inputs=[*state, self._sums], outputs=state
        )
        self._evaluate = mx.compile(self._loss, inputs=state)

    def __call__(
        self,
        batch: Batch | Sequence[Batch],
        rate: float,
        seed: int,
        stop: bool = False,
    ) -> tuple[mx.array, ...]:
        """Train on a batch, or on several as if they were one.

        Args:
            rate: the learning rate.
            seed: of everything random in this step, so that a resumed run draws alike.
            stop: tells the other processes, if there are some, of a wish to stop.

        Returns:
            Summed loss, trained tokens and gradient norm, not yet computed; of several
            processes, also how many of them wish to stop.

        Raises:
            UserError: mlx-lm's code of this architecture has no gradient.
        """
        mx.random.seed(seed)
        self.model.train()
        window = [batch] if isinstance(batch, Batch) else batch
        window = [local_rows(one, self.ranks) for one in window]
        stops = None if self.ranks.size == 1 else mx.array(float(stop))
        if len(window) > 1:
            return self._accumulate(window, mx.array(rate), stops)
        with translate_trace_errors():
            return self._train(*self._given(window[0]), mx.array(rate), stops)

    def reach(self, number: int) -> bool:
        """Be ready for a step, counted from 0; whether rounding changes with it."""
        if not self.fake_quant or not self.fake_quant.on_step(number, self.parameters):
            return False
        self._compile()
        return True

    def evaluate(self, batches) -> tuple[float, int]:
        """Summed loss, as it is trained, and trained tokens; dropout off."""
        self.model.eval()
        loss = tokens = 0.0
        # Who keeps a share is needed for every batch.
        if self.shards:
            own = (local_rows(batch, self.ranks) for batch in batches)
        else:
            own = self.ranks.shard(batches)
        for batch in own:
            loss += self._evaluate(*self._given(batch)).item()
            tokens += batch.mask.sum().item()
        loss, tokens = self.ranks.all_reduce_scalars(loss, tokens)
        return loss, int(tokens)

    def serve(self) -> nn.Module:
        """The model with the weights of the next forward in place, dropout off.

        Of shares, the first process alone has it; all must call this, and `release`.
        """
        if self.shards:
            weights = self.whole(dict.fromkeys(self.parameters, self.compute))
            self.model.update(tree_unflatten(list(weights.items())))
        else:
            self._set(self.parameters)
        return self.model.eval()

    def release(self) -> None:
        """Leave the model no more than this process's share of the weights."""
        if self.shards:
            self.model.update(tree_unflatten(list(self.parameters.items())))

    def whole(self, types: dict[str, mx.Dtype]) -> dict[str, mx.array]:
        """The trained parameters, gathered one by one; of other processes none.

        Args:
            types: of the results, by path.
        """
        found = {}
        for path, value in self.parameters.items():
            value = self.shards.whole(path, value.astype(types[path]))
            if self.ranks.is_first:
                found[path] = value
        return found

    def _given(self, batch: Batch) -> tuple:
        # Every number of places is a trace of its own.
        places = batch.places if self.chunked else None
        return *batch.arrays, places, batch.target

    def _set(self, parameters: dict[str, mx.array]) -> None:
        if self.fake_quant:
            weights = self.fake_quant.forward_weights(parameters, self.compute)
        else:
            weights = self.shards.placed(parameters)
        self.model.update(tree_unflatten(list(weights.items())))

    def _loss(self, *batch) -> mx.array:
        value = self.chunked and self.chunked.value
        return self._summed(self.parameters, batch, self.shards.gathering(), value)

    def _loss_of(self, parameters: dict[str, mx.array], *batch) -> mx.array:
        """The same, to be differentiated by the parameters."""
        return self._summed(parameters, batch, self._running(), self.chunked)

    def _summed(
        self, parameters, batch, running: AbstractContextManager, chunked
    ) -> mx.array:
        tokens, mask, documents, places, target = batch
        self._set(parameters)
        inputs, labels = tokens[:, :-1], (tokens[:, 1:], mask)
        within = self._within(documents)
        if self.taught:
            labels += self.taught.labels(inputs, documents, target)
        loss = self.taught or cross_entropy_sum
        with running:
            if chunked:
                return chunked(inputs, labels, places, loss=loss, **within)
            return loss(self.model(inputs, **within), *labels)

    def _running(self) -> AbstractContextManager:
        if self._recomputed:
            return checkpointed(self._recomputed, self.shards.forward)
        return self.shards.gathering()

    def _within(self, documents: mx.array | None) -> dict:
        """What a packed batch's model is called with besides the tokens."""
        return {} if documents is None else {"cache": self.caches(documents)}

    def _gradients(self, *batch):
        return mx.value_and_grad(self._loss_of)(self.parameters, *batch)

    def _update(self, tokens, mask, documents, places, target, rate, stops):
        loss, gradients = self._gradients(tokens, mask, documents, places, target)
        return self._apply(gradients, loss, mask.sum(), rate, stops)

    def _accumulate(
        self, window: Sequence[Batch], rate: mx.array, stops: mx.array | None
    ):
        self._sums.update({k: mx.zeros_like(v) for k, v in self.parameters.items()})
        loss = trained = mx.array(0.0)
        for batch in window:
            with translate_trace_errors():
                loss = loss + self._add(*self._given(batch))
            trained = trained + batch.mask.sum()
            # Not waited for; without it all batches might be in memory at once.
            mx.async_eval(loss, trained, self._sums)
        outputs = self._finish(loss, trained, rate, stops)
        self._sums.clear()
        return outputs

    def _sum(self, *batch) -> mx.array:
        loss, gradients = self._gradients(*batch)
        self._sums.update({k: self._sums[k] + g for k, g in gradients.items()})
        return loss

    def _improve(self, loss: mx.array, trained: mx.array, rate: mx.array, stops):
        return self._apply(self._sums, loss, trained, rate, stops)

    def _apply(self, gradients, loss: mx.array, trained: mx.array, rate, stops):
        told = [] if stops is None else [stops]
        numbers = [loss, trained, *told]
        (loss, trained, *told), gradients = self.shards.all_sum(numbers, gradients)
        trained = mx.maximum(trained, 1)
        gradients = {k: g / trained for k, g in gradients.items()}
        norm = self.shards.norm(gradients)
        gradients = clip_grad_norm(gradients, norm, self.max_grad_norm)
        self.optimizer.learning_rate = rate
        decayed = decay_weights(self.parameters, rate, self.weight_decay)
        stepped = self.optimizer.apply_gradients(gradients, decayed)
        for name, ratio in self.rates.items():
            old = self.parameters[name]
            stepped[name] = old + ratio * (stepped[name] - old)
        self.parameters.update(stepped)
        return loss, trained, norm, *told
