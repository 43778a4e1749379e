"""One compiled optimizer step: float32 master weights, loss per trained token."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..data.batching import Batch, shard_batch
from ..errors import UserError
from ..interfaces import SINGLE_PROCESS, Communicator
from ..models.hooks import find_blocks
from ..quantization.qat.fake_quant import FakeQuant
from .chunked_loss import ChunkedLoss, Loss
from .distillation import DistillationLoss
from .document_mask import DocumentCaches
from .fsdp import ShardedParameters
from .gradient_checkpointing import checkpointed
from .grpo_loss import GRPOLoss
from .losses import cross_entropy_sum, token_log_probs
from .optimizers import OptimizerConfig, make_optimizer
from .preference_loss import PreferenceLoss
from .schedules import clip_grad_norm, decay_weights

# Losses of the log-probabilities that the model gives to whole completions.
CompletionLoss = PreferenceLoss | GRPOLoss


class StepOutput(NamedTuple):
    """Scalars of one optimizer step over all ranks, not yet computed.

    Attributes:
        loss_sum: summed over the trained tokens, or over what a loss of completions
            counts.
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


class BatchLoss(Protocol):
    """A loss that runs the model on a batch itself.

    Attributes:
        metric_names: of the metrics, which are summed as the loss is.
        main_metric: the one that a progress line shows.
    """

    metric_names: Sequence[str]
    main_metric: str

    def __call__(
        self,
        model: nn.Module,
        tokens: mx.array,
        mask: mx.array,
        places: mx.array | None,
        target: tuple[mx.array, ...],
    ) -> tuple[mx.array, mx.array, mx.array]:
        """The summed loss, its count, and the metrics [2, M] of a batch."""
        ...


class TrainStep:
    """The trained parameters of a model, and the compiled step that updates them.

    The model is only a function: before every forward pass its trained weights are set
    from the float32 master weights, rounded as the export will round them and, in
    quantization-aware training, quantized as it will quantize them.

    Args:
        model: everything that is not trained is frozen.
        optimizer: its algorithm and hyperparameters.
        stored_dtypes: dtypes of the trained checkpoint, by path; those of the model's
            weights where it has none.
        compute_dtype: dtype of the forward and backward pass.
        fake_quant: quantizes the weights of every forward pass; None = no QAT.
        chunked_loss: computes the loss without full logits; None = the plain loss.
        document_caches: keeps attention inside the documents of packed batches; None =
            no batch is packed.
        loss: the summed loss of logits, targets and mask; the loss against a teacher;
            one of the log-probabilities of whole completions; or one that runs the
            model itself.
        gradient_checkpointing: keeps only the inputs and outputs of every block.
        ranks: the processes that train this model; each gets its share of a batch.
        fsdp: every rank holds only its shard of parameters, gradients and moments.
            Incompatible with `fake_quant`, "adafactor" and "muon".

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
        fake_quant: FakeQuant | None = None,
        chunked_loss: ChunkedLoss | None = None,
        document_caches: DocumentCaches | None = None,
        loss: Loss | DistillationLoss | CompletionLoss | BatchLoss = cross_entropy_sum,
        gradient_checkpointing: bool = False,
        ranks: Communicator = SINGLE_PROCESS,
        fsdp: bool = False,
    ):
        self.model = model
        self.config = optimizer or OptimizerConfig()
        self.compute_dtype, self.fake_quant = compute_dtype, fake_quant
        self.chunked_loss, self.loss = chunked_loss, loss
        self.document_caches = document_caches
        self.has_metrics = hasattr(loss, "metric_names")
        self._of_completions = isinstance(loss, CompletionLoss)
        self._runs_model = self.has_metrics and not self._of_completions
        self.ranks = ranks
        blocks = find_blocks(model)
        if gradient_checkpointing and blocks is None:
            raise UserError(
                "this model has no list of blocks to run twice",
                hint="gradient_checkpointing: false",
            )
        self._checkpointed_blocks = blocks if gradient_checkpointing else None
        trained = _trained_parameters(model, fake_quant)
        dtypes = {path: value.dtype for path, value in trained.items()}
        self.stored_dtypes = dtypes | (stored_dtypes or {})
        self.sharding = ShardedParameters(
            trained if fsdp else {},
            ranks,
            stored_dtypes=self.stored_dtypes,
            compute_dtype=compute_dtype,
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

    @property
    def metric_names(self) -> Sequence[str]:
        """Of the metrics of the loss."""
        return self.loss.metric_names if self.has_metrics else ()

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
            self._eval_loss, inputs=state, outputs=[mx.random.state]
        )
        self._log_probs_batch = mx.compile(self._eval_log_probs)

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
            return StepOutput(*self._train_batch(*self._inputs(batches[0]), *scalars))

    def on_step(self, step: int) -> bool:
        """Prepare for a step, counted from 0; returns whether quantization changes."""
        if not self.fake_quant or not self.fake_quant.on_step(step, self.parameters):
            return False
        self._compile()
        return True

    def evaluate(self, batches) -> EvalOutput:
        """Summed training loss of batches, their tokens or examples, and metrics.

        Without dropout.
        """
        self.model.eval()
        if self._runs_model:
            # What it draws at random is the same in every evaluation.
            mx.random.seed(0)
        if self.sharding:
            # Every batch needs the shards of all ranks.
            local_batches = (shard_batch(batch, self.ranks) for batch in batches)
        else:
            local_batches = self.ranks.shard(batches)
        totals = [0.0] * (2 + 2 * len(self.metric_names))
        for batch in local_batches:
            loss_sum, count, _, metrics = self._evaluate_batch(*self._inputs(batch))
            values = [loss_sum.item(), count.item(), *metrics.reshape(-1).tolist()]
            totals = [total + v for total, v in zip(totals, values, strict=True)]
        # Ranks decide by the loss when to stop, so they must have the same one.
        totals = self.ranks.all_reduce_scalars(*totals)
        loss_sum, count, *metrics = totals
        means = metric_means(self.metric_names, metrics)
        return EvalOutput(loss_sum, int(count), means)

    def log_probs(
        self, batch: Batch, parameters: dict[str, mx.array] | None = None
    ) -> mx.array:
        """Log-probabilities of the targets of a batch, float32 [B, L].

        Targets that are not trained may have the value 0.

        Args:
            parameters: the trained weights; None = the present ones.
        """
        self.model.eval()
        places = batch.head_positions if self.chunked_loss else None
        return self._log_probs_batch(
            self.parameters if parameters is None else parameters, batch.tokens, places
        )

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

    def _inputs(self, batch: Batch) -> tuple:
        # Every number of places compiles once more, so pass them only if used.
        needs_places = self.chunked_loss or self._runs_model
        places = batch.head_positions if needs_places else None
        return *batch.arrays, places, batch.target

    def _set_weights(self, parameters: dict[str, mx.array]) -> None:
        qparams = self.fake_quant.qparams if self.fake_quant else {}
        weights = self.sharding.forward_weights(
            {k: v for k, v in parameters.items() if k not in qparams}
        )
        if self.fake_quant:
            weights |= self.fake_quant.forward_weights(parameters, self.compute_dtype)
        self.model.update(tree_unflatten(list(weights.items())))

    def _train(
        self, tokens, mask, documents, places, target, learning_rate, stop_requests
    ):
        batch = tokens, mask, documents, places, target
        sums, gradients = self._gradients(*batch)
        return self._update(gradients, *sums, learning_rate, stop_requests)

    def _train_accumulated(
        self, batches: Sequence[Batch], learning_rate, stop_requests
    ):
        zeros = {k: mx.zeros_like(v) for k, v in self.parameters.items()}
        self._grad_sums.update(zeros)
        totals = self._no_sums()
        for batch in batches:
            with translate_trace_errors():
                sums = self._accumulate_batch(*self._inputs(batch))
            totals = [a + b for a, b in zip(totals, sums, strict=True)]
            # Starts the work; else all micro-batches might be in memory at once.
            mx.async_eval(totals, self._grad_sums)
        outputs = self._update_accumulated(*totals, learning_rate, stop_requests)
        self._grad_sums.clear()
        return outputs

    def _no_sums(self) -> tuple[mx.array, ...]:
        """The loss, its count, the tokens and the metrics of no batch."""
        counts = mx.array(0.0 if self.has_metrics else 0), mx.array(0)
        return mx.array(0.0), *counts, mx.zeros((2, len(self.metric_names)))

    def _accumulate(self, *batch) -> tuple[mx.array, ...]:
        batch_sums, gradients = self._gradients(*batch)
        sums = {k: self._grad_sums[k] + g for k, g in gradients.items()}
        self._grad_sums.update(sums)
        return batch_sums

    def _gradients(self, *batch):
        return mx.value_and_grad(self._train_loss)(self.parameters, *batch)

    def _train_loss(
        self, parameters: dict[str, mx.array], *batch
    ) -> tuple[mx.array, ...]:
        if self._checkpointed_blocks:
            blocks = checkpointed(
                self._checkpointed_blocks, self.sharding.gathered_forward
            )
        else:
            blocks = self.sharding.gathered_blocks()
        return self._loss(parameters, batch, blocks, self.chunked_loss)

    def _eval_loss(self, *batch) -> tuple[mx.array, ...]:
        chunked = self.chunked_loss and self.chunked_loss.value
        return self._loss(
            self.parameters, batch, self.sharding.gathered_blocks(), chunked
        )

    def _loss(
        self, parameters, batch, blocks: AbstractContextManager, chunked
    ) -> tuple[mx.array, ...]:
        """The summed loss, its count, the trained tokens and the metrics."""
        tokens, mask, _, places, target = batch
        self._set_weights(parameters)
        if self._runs_model:
            loss, count, metrics = self.loss(self.model, tokens, mask, places, target)
            return loss, count, mask.sum(), metrics
        if self._of_completions:
            with blocks:
                logps = self._log_probs(tokens, places)
            loss, count, metrics = self.loss(logps, mask, *(target or ()))
            return loss, count, mask.sum(), metrics
        loss = self._token_loss(batch, blocks, chunked)
        # One array: mx.compile fails on two outputs that are computed alike.
        num_tokens = mask.sum()
        return loss, num_tokens, num_tokens, mx.zeros((2, 0))

    def _eval_log_probs(self, parameters, tokens, places) -> mx.array:
        self._set_weights(parameters)
        return self._log_probs(tokens, places)

    def _log_probs(self, tokens: mx.array, places: mx.array | None) -> mx.array:
        """Log-probabilities of the targets, float32 [B, L]."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        temperature = self.loss.temperature
        if self.chunked_loss:
            return self.chunked_loss.log_probs(
                inputs, targets, places, temperature=temperature
            )
        return token_log_probs(self.model(inputs), targets, temperature)

    def _token_loss(self, batch, blocks: AbstractContextManager, chunked) -> mx.array:
        tokens, mask, documents, places, target = batch
        inputs, labels = tokens[:, :-1], (tokens[:, 1:], mask)
        kwargs = {}
        if documents is not None:
            kwargs["cache"] = self.document_caches(documents)
        loss = self.loss
        # A loss against a teacher.
        if hasattr(loss, "labels"):
            labels += loss.labels(inputs, documents, target)
        with blocks:
            if chunked:
                return chunked(inputs, labels, places, loss=loss, **kwargs)
            return loss(self.model(inputs, **kwargs), *labels)

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


def _trained_parameters(
    model: nn.Module, fake_quant: FakeQuant | None
) -> dict[str, mx.array]:
    trained = dict(tree_flatten(model.trainable_parameters()))
    if fake_quant is None:
        return trained
    # Weights merged from an adapter are not trained; the adapter is.
    derived = fake_quant.derived_weights
    return {k: v for k, v in trained.items() if k not in derived} | fake_quant.qparams


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
