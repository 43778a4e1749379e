"""One compiled optimizer step: float32 master weights, loss per trained token."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..data.batching import Batch, BatchArrays, shard_batch
from ..errors import UserError
from ..interfaces import SINGLE_PROCESS, Communicator, WeightTransform
from ..models.hooks import ModuleProxy, find_blocks, replace_module
from .document_mask import DocumentCaches
from .fsdp import ShardedParameters
from .gradient_checkpointing import checkpointed
from .losses import Loss, LossModel, TokenLoss
from .optimizers import OptimizerConfig, make_optimizer
from .schedules import clip_grad_norm, decay_weights


class StepOutput(NamedTuple):
    """Scalars of one optimizer step over all ranks, not yet computed.

    Attributes:
        loss_sum: summed over the trained tokens, or over what the loss counts.
        num_tokens: the trained tokens of the step.
        grad_norm: before clipping.
        stop_requests: number of ranks that were asked to stop.
        loss_count: number that `loss_sum` is divided by.
        metrics: [2, M], sums of the loss's metrics and the numbers of their values.
    """

    loss_sum: mx.array
    num_tokens: mx.array
    grad_norm: mx.array
    stop_requests: mx.array
    loss_count: mx.array
    metrics: mx.array


class EvalOutput(NamedTuple):
    """Sums over validation batches and all ranks.

    Attributes:
        loss_sum, loss_count: as in `StepOutput`.
        metrics: means by name.
    """

    loss_sum: float
    loss_count: int
    metrics: dict[str, float]


class TrainStep:
    """The trained parameters of a model, and the compiled step that updates them.

    The model is only a function: before every forward pass its trained weights are set
    from the float32 master weights, rounded as the export will round them, and from
    what `weight_transform` makes of them.

    Args:
        model: everything that is not trained is frozen.
        optimizer: its algorithm and hyperparameters.
        stored_dtypes: dtypes of the trained checkpoint, by path; those of the model's
            weights where it has none.
        compute_dtype: dtype of the forward and backward pass.
        weight_transform: makes weights of every forward pass, such as quantized ones.
        loss_model: runs the model on a batch; None = with all logits at once.
        document_caches: keeps attention inside the documents of packed batches; None =
            no batch is packed.
        loss: what is minimized; by default the cross-entropy.
        gradient_checkpointing: keeps only the inputs and outputs of every block.
        ranks: the processes that train this model; each gets its share of a batch.
        fsdp: every rank holds only its shard of parameters, gradients and moments.
            Incompatible with `weight_transform`, "adafactor" and "muon".

    Raises:
        UserError: gradient checkpointing of a model without blocks, or an 8-bit
            optimizer whose blocks would lie in the shards of two ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig | None = None,
        *,
        stored_dtypes: dict[str, mx.Dtype] | None = None,
        compute_dtype: mx.Dtype = mx.float32,
        weight_transform: WeightTransform | None = None,
        loss_model: LossModel | None = None,
        document_caches: DocumentCaches | None = None,
        loss: Loss | None = None,
        gradient_checkpointing: bool = False,
        ranks: Communicator = SINGLE_PROCESS,
        fsdp: bool = False,
    ):
        self.model = model
        self.config = optimizer or OptimizerConfig()
        self.compute_dtype = compute_dtype
        self.weight_transform = weight_transform or WeightTransform()
        self.loss = loss or TokenLoss()
        self._loss_model = loss_model or LossModel(model)
        self._loss_model.document_caches = document_caches
        # Every number of places compiles once more, so pass them only if used.
        self._with_places = self._loss_model.uses_places or self.loss.needs_places
        self.ranks = ranks
        blocks = find_blocks(model)
        if gradient_checkpointing and blocks is None:
            raise UserError(
                "this model has no list of blocks to run twice",
                hint="gradient_checkpointing: false",
            )
        self._blocks, self._checkpoints = blocks, gradient_checkpointing
        # Derived weights are not trained, but what they are computed from.
        derived = self.weight_transform.derived_weights
        trained = tree_flatten(model.trainable_parameters())
        trained = {path: value for path, value in trained if path not in derived}
        trained |= self.weight_transform.qparams
        dtypes = {path: value.dtype for path, value in trained.items()}
        self.stored_dtypes = dtypes | (stored_dtypes or {})
        self.sharding = ShardedParameters(
            trained if fsdp else {},
            ranks,
            stored_dtypes=self.stored_dtypes,
            blocks=blocks,
        )
        self.parameters = {
            path: self.sharding.shard(path, value).astype(mx.float32)
            for path, value in trained.items()
        }
        self.optimizer = make_optimizer(
            self.config,
            self.parameters,
            block_prefix=blocks.prefix if blocks else "layers.",
            sizes={path: value.size for path, value in trained.items()},
        )
        # Gradients of the micro-batches so far; empty between steps.
        self._grad_sums: dict[str, mx.array] = {}
        mx.eval(self.parameters, self.optimizer.state)
        self._compile()

    def _compile(self) -> None:
        state = [self.parameters, self.optimizer.state, mx.random.state]
        accumulated = [self._grad_sums, mx.random.state]
        self._train_batch = mx.compile(self._train, inputs=state, outputs=state)
        self._accumulate_batch = mx.compile(
            self._accumulate, inputs=[*state, self._grad_sums], outputs=accumulated
        )
        self._update_accumulated = mx.compile(
            lambda *scalars: self._update(self._grad_sums, *scalars),
            inputs=[*state, self._grad_sums],
            outputs=state,
        )
        self._evaluate_batch = mx.compile(
            lambda *arrays: self._loss_sums(self.parameters, *arrays),
            inputs=state,
            outputs=[mx.random.state],
        )
        self._log_probs_batch = mx.compile(self._log_probs)

    def __call__(
        self,
        batch: Batch | Sequence[Batch],
        learning_rate: float,
        seed: int,
        stop: bool = False,
    ) -> StepOutput:
        """Train on a batch, or on several micro-batches as if they were one.

        Args:
            seed: of all random numbers of this step, so that a resumed run repeats it.
            stop: whether this rank was asked to stop; all ranks get the sum.

        Raises:
            UserError: mlx-lm's code of this architecture has no gradient.
        """
        mx.random.seed(seed)
        self.model.train()
        batches = [batch] if isinstance(batch, Batch) else batch
        batches = [shard_batch(b, self.ranks) for b in batches]
        scalars = mx.array(learning_rate), mx.array(float(stop))
        if len(batches) > 1:
            return StepOutput(*self._train_accumulated(batches, *scalars))
        with translate_trace_errors():
            return StepOutput(*self._train_batch(*self._arrays(batches[0]), *scalars))

    def on_step(self, step: int) -> bool:
        """Prepare for a step, from 0; returns whether the forward pass changes."""
        changes = self.weight_transform.on_step(step, self.parameters)
        if changes:
            self._compile()
        return changes

    def evaluate(self, batches) -> EvalOutput:
        """Summed training loss of batches, their tokens or examples, and metrics.

        Without dropout.
        """
        self.model.eval()
        # What a loss draws at random is the same in every evaluation.
        mx.random.seed(0)
        if self.sharding:
            # Every batch needs the shards of all ranks.
            local_batches = (shard_batch(batch, self.ranks) for batch in batches)
        else:
            local_batches = self.ranks.shard(batches)
        names = self.loss.metric_names
        totals = [0.0] * (2 + 2 * len(names))
        for batch in local_batches:
            loss_sum, count, _, metrics = self._evaluate_batch(*self._arrays(batch))
            values = [loss_sum.item(), count.item(), *metrics.reshape(-1).tolist()]
            totals = [total + v for total, v in zip(totals, values, strict=True)]
        # Ranks decide by the loss when to stop, so they must have the same one.
        totals = self.ranks.all_reduce_scalars(*totals)
        loss_sum, count, *metrics = totals
        return EvalOutput(loss_sum, int(count), metric_means(names, metrics))

    def log_probs(
        self,
        batch: Batch,
        temperature: float = 1.0,
        parameters: dict[str, mx.array] | None = None,
    ) -> mx.array:
        """`LossModel.log_probs` of a batch, without dropout.

        Args:
            parameters: the trained weights; None = the present ones.
        """
        self.model.eval()
        parameters = self.parameters if parameters is None else parameters
        return self._log_probs_batch(parameters, temperature, *self._arrays(batch))

    def materialize(self) -> nn.Module:
        """The model with the weights of the next forward pass, in evaluation mode.

        With FSDP only the first rank gets it, and all ranks must call this method and
        then `free`.
        """
        if self.sharding:
            weights = self.gather_parameters()
            weights = {k: v.astype(self.compute_dtype) for k, v in weights.items()}
            self.model.update(tree_unflatten(list(weights.items())))
        else:
            self._set_weights(self.parameters)
        return self.model.eval()

    def free(self) -> None:
        """With FSDP, leave only this rank's shards in the model."""
        if self.sharding:
            self.model.update(tree_unflatten(list(self.parameters.items())))

    def gather_parameters(self) -> dict[str, mx.array]:
        """The full trained parameters, in the dtypes of the checkpoint, on the first
        rank; an empty dict on the others."""
        gathered = {}
        for path, value in self.parameters.items():
            value = self.sharding.unshard(path, value.astype(self.stored_dtypes[path]))
            if self.ranks.is_first:
                gathered[path] = value
        return gathered

    def _arrays(self, batch: Batch) -> BatchArrays:
        return batch.arrays(with_places=self._with_places)

    def _set_weights(self, parameters: dict[str, mx.array]) -> None:
        others = self.weight_transform.qparams
        weights = self.sharding.forward_weights(
            {path: value for path, value in parameters.items() if path not in others},
            self.compute_dtype,
        )
        weights |= self.weight_transform.forward_weights(parameters, self.compute_dtype)
        self.model.update(tree_unflatten(list(weights.items())))

    def _train(self, *arrays_and_scalars):
        *arrays, learning_rate, stop_requests = arrays_and_scalars
        sums, gradients = self._gradients(*arrays)
        return self._update(gradients, *sums, learning_rate, stop_requests)

    def _train_accumulated(
        self, batches: Sequence[Batch], learning_rate, stop_requests
    ):
        zeros = {k: mx.zeros_like(v) for k, v in self.parameters.items()}
        self._grad_sums.update(zeros)
        # The loss, its count, the tokens and the metrics of no batch.
        metrics = mx.zeros((2, len(self.loss.metric_names)))
        totals = mx.array(0.0), mx.array(0.0), mx.array(0), metrics
        for batch in batches:
            with translate_trace_errors():
                sums = self._accumulate_batch(*self._arrays(batch))
            totals = [a + b for a, b in zip(totals, sums, strict=True)]
            # Starts the work; else all micro-batches might be in memory at once.
            mx.async_eval(totals, self._grad_sums)
        outputs = self._update_accumulated(*totals, learning_rate, stop_requests)
        self._grad_sums.clear()
        return outputs

    def _accumulate(self, *batch) -> tuple[mx.array, ...]:
        batch_sums, gradients = self._gradients(*batch)
        sums = {k: self._grad_sums[k] + g for k, g in gradients.items()}
        self._grad_sums.update(sums)
        return batch_sums

    def _gradients(self, *arrays):
        return mx.value_and_grad(self._loss_sums)(self.parameters, *arrays)

    def _loss_sums(
        self, parameters: dict[str, mx.array], *arrays
    ) -> tuple[mx.array, ...]:
        """The summed loss, its count, the trained tokens and the metrics."""
        batch = BatchArrays(*arrays)
        self._set_weights(parameters)
        with self._replaced_blocks():
            loss, count, metrics = self.loss(self._loss_model, batch)
        # See `TokenLoss`: nothing else may be computed alike.
        num_tokens = mx.where(batch.mask, 1, 0).sum()
        return loss, count, num_tokens, metrics

    def _log_probs(self, parameters, temperature: float, *arrays) -> mx.array:
        self._set_weights(parameters)
        with self._replaced_blocks():
            return self._loss_model.log_probs(BatchArrays(*arrays), temperature)

    @contextmanager
    def _replaced_blocks(self) -> Iterator[None]:
        """Checkpoint the blocks in training, and gather the shards of each.

        Backward passes may run after the context closes.
        """
        blocks, checkpoints = self._blocks, self._checkpoints and self.model.training
        if not (checkpoints or (self.sharding and blocks)):
            yield
            return
        proxies = []
        for number, block in enumerate(blocks.trunk[blocks.name]):
            forward = self.sharding.gathered_forward(number, block)
            if checkpoints:
                forward = checkpointed(block, forward)
            proxies.append(ModuleProxy(block, forward))
        with replace_module(blocks.trunk, blocks.name, proxies):
            yield

    def _update(
        self,
        gradients,
        loss_sum,
        count,
        num_tokens,
        metrics,
        learning_rate,
        stop_requests,
    ):
        """Sum over all ranks, divide by the count of the loss, clip, and step."""
        sums, gradients = self.sharding.all_reduce(
            [loss_sum, count, num_tokens, metrics, stop_requests], gradients
        )
        loss_sum, count, num_tokens, metrics, stop_requests = sums
        count, num_tokens = mx.maximum(count, 1), mx.maximum(num_tokens, 1)
        gradients = {k: g / count for k, g in gradients.items()}
        norm = self.sharding.grad_norm(gradients)
        gradients = clip_grad_norm(gradients, norm, self.config.max_grad_norm)
        self.optimizer.learning_rate = learning_rate
        decayed = decay_weights(
            self.parameters, learning_rate, self.config.weight_decay
        )
        updated = self.optimizer.apply_gradients(gradients, decayed)
        for path, multiplier in self.config.lr_multipliers.items():
            before = self.parameters[path]
            updated[path] = before + multiplier * (updated[path] - before)
        self.parameters.update(updated)
        return loss_sum, num_tokens, norm, stop_requests, count, metrics


def metric_means(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """Means by name of the metrics [2, M], flattened; without those of no value."""
    pairs = zip(names, sums[: len(names)], sums[len(names) :], strict=True)
    return {name: total / count for name, total, count in pairs if count}


@contextmanager
def translate_trace_errors() -> Iterator[None]:
    """Turn errors while tracing, which come from the model's code, into `UserError`."""
    try:
        yield
    except (RuntimeError, ValueError, AttributeError) as error:
        raise UserError(
            f"this architecture cannot be trained: {str(error).splitlines()[0]}",
            hint="its code in mlx-lm has no gradient, or reads an adapted layer's "
            "weight itself; adapter.target_modules: auto excludes such layers",
        ) from error
