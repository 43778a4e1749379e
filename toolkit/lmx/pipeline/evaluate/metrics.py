"""The metrics of an evaluation: an entry each, which fills a part of report.json."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...config.evaluate import EvaluateConfig
from ...data.answer_filters import FILTERS
from ...data.batching import Batch
from ...data.record_formats import DataRecord
from ...evaluation import lm_eval
from ...evaluation.divergence import measure_divergence
from ...evaluation.exact_match import ExactMatch, measure_exact_match
from ...evaluation.latency import measure_latency
from ...evaluation.perplexity import Perplexity, measure_perplexity
from ...evaluation.weight_error import measure_layers
from ...generation.generator import Generator
from ...generation.kv_cache.eviction import KVLimit
from ...generation.speculative.draft_length import DraftLengthController
from ...generation.speculative.prompt_lookup import PromptLookupProposer
from ...models.checkpoint import checkpoint_size
from ...models.loader import LoadedModel
from ...models.quantized_layers import full_precision_inputs, has_quantized_inputs
from ...run.distributed import alone
from ...run.parallel_dims import ParallelDims
from ...run.progress import ProgressBar
from ..extensions import Metric as CustomMetric
from .planned_work import PlannedWork
from .questions import Questions

LATENCY_PROMPTS = 2
# Draft tokens of prompt lookup, where their number does not adapt to the speed.
LOOKED_UP = 4


@dataclass(frozen=True)
class Inputs:
    """What every model of an evaluation is measured on.

    Attributes:
        tasks: of lm-evaluation-harness, by name or path.
        custom: the caller's own metrics by name.
        parallel: the processes that share the work.
        work: what is planned.
        bar: counts it.
    """

    config: EvaluateConfig
    records: list[DataRecord]
    questions: Questions
    tasks: list[str | Path]
    custom: dict[str, CustomMetric]
    parallel: ParallelDims
    work: PlannedWork
    bar: ProgressBar

    def alone(self, work: Callable[[], dict]) -> dict:
        """Figures of the processes of rank 0's model alone; the others get none.

        Only rank 0 writes the report.
        """
        is_worker = self.parallel.data.is_first
        return alone(self.parallel.world, work, is_worker=is_worker) or {}


@dataclass
class Measured:
    """A model, and what the models that refer to it are compared with.

    Attributes:
        kv_limit, kv_memory: see `Engine`. Ranks that hold a model together have the
            same.
    """

    name: str
    loaded: LoadedModel
    batches: list[Batch]
    reference: "Measured | None"
    kv_limit: KVLimit | None = None
    kv_memory: int | None = None
    perplexity: Perplexity | None = None
    exact_match: ExactMatch | None = None

    def generator(self, **options) -> Generator:
        """A generator with the KV-cache bits that the checkpoint names."""
        loaded = self.loaded
        options |= {"kv_bits": loaded.kv_bits, "kv_memory": self.kv_memory}
        options |= {"kv_limit": self.kv_limit}
        return Generator(loaded.model, loaded.tokenizer, **options)


def _predictions(model: Measured, inputs: Inputs) -> dict:
    """Perplexity and, with a reference, divergence: one pass over the batches."""
    reference, network = model.reference, model.loaded.model
    batches, ranks = _counted(model, inputs), inputs.parallel.data
    if reference is None:
        model.perplexity, divergence = measure_perplexity(network, batches, ranks), {}
    else:
        result = measure_divergence(reference.loaded.model, network, batches, ranks)
        model.perplexity, divergence = result.perplexity, result.figures
    perplexity = model.perplexity
    figures = {
        "perplexity": perplexity.value,
        "perplexity_stderr": perplexity.stderr,
        "loss": perplexity.loss,
        "tokens": perplexity.tokens,
    } | divergence
    if reference is not None:
        ratio, stderr = perplexity.ratio_to(reference.perplexity)
        figures |= {"perplexity_ratio": ratio, "perplexity_ratio_stderr": stderr}
    return figures


def _weights_only(model: Measured, inputs: Inputs) -> dict:
    """The divergence of a model with quantized activations if they were not."""
    network = model.loaded.model
    if model.reference is None or not has_quantized_inputs(network):
        return {}
    inputs.work.add_passes(2)
    with full_precision_inputs(network):
        result = measure_divergence(
            model.reference.loaded.model,
            network,
            _counted(model, inputs),
            inputs.parallel.data,
        )
    return {
        "kl_mean_weights_only": result.kl_mean,
        "kl_stderr_weights_only": result.kl_stderr,
    }


def _size(model: Measured, inputs: Inputs) -> dict:
    size = checkpoint_size(model.loaded.path)
    return {"bits_per_weight": size.bits_per_weight, "bytes": size.bytes}


def _layers(model: Measured, inputs: Inputs) -> dict:
    """Bits and error of the layers of the run's quantized model, if a rank has it."""
    is_whole = inputs.parallel.tensor.size == 1
    if model.name != "quantized" or model.reference is None or not is_whole:
        return {}
    models = model.reference.loaded, model.loaded
    return inputs.alone(lambda: {"layers": measure_layers(*models)})


def _exact_match(model: Measured, inputs: Inputs) -> dict:
    """Answers to all questions in one batch, and how many are right."""
    config = inputs.config
    inputs.questions.answer(
        model.name,
        model.generator(),
        config.max_tokens,
        inputs.bar.advance,
        inputs.parallel.data,
    )
    answered = [q for q in inputs.questions.exact if model.name in q.answers]
    if not answered:
        return {}
    model.exact_match = result = measure_exact_match(
        [(q.skill, q.expected, q.answers[model.name]) for q in answered],
        FILTERS[config.exact_match.filter],
    )
    figures = {
        "exact_match": result.overall,
        "exact_match_stderr": result.stderr,
        "exact_match_by_skill": result.by_skill,
        "exact_match_by_field": result.by_field,
    }
    if model.reference is not None and model.reference.exact_match:
        change, stderr = result.change_from(model.reference.exact_match)
        figures |= {"exact_match_change": change, "exact_match_change_stderr": stderr}
    return figures


def _latency(model: Measured, inputs: Inputs) -> dict:
    """Latency of standard decoding, and of the proposer that needs no model."""
    max_tokens = inputs.config.latency_tokens
    if max_tokens is None:
        return {}
    batches = model.batches[-LATENCY_PROMPTS:]
    prompts = [[int(t) for t in b.tokens[0, :-1].tolist()] for b in batches]
    if positions := model.generator().max_positions:
        # Room for all tokens that are timed.
        prompts = [prompt[: max(1, positions - max_tokens)] for prompt in prompts]
    # Ranks that hold a model together measure different times.
    fixed = LOOKED_UP if inputs.parallel.tensor.size > 1 else None
    lookup = partial(
        model.generator,
        make_proposer=lambda _: PromptLookupProposer(),
        draft_length=DraftLengthController(fixed=fixed),
    )
    arms = {"standard": model.generator, "prompt_lookup": lookup}
    figures = inputs.alone(
        lambda: measure_latency(arms, prompts, max_tokens=max_tokens)
    )
    inputs.bar.advance({"latency": 1})
    return figures


def _tasks(model: Measured, inputs: Inputs) -> dict:
    if not inputs.tasks:
        return {}
    limit = inputs.config.task_limit
    scores = lm_eval.measure_tasks(model.loaded, inputs.tasks, limit=limit)
    inputs.bar.advance({"tasks": 1})
    return {"tasks": scores}


def _custom(model: Measured, inputs: Inputs) -> dict:
    """The caller's own metrics."""
    if not inputs.custom:
        return {}
    figures = inputs.alone(
        lambda: {
            "custom": {
                name: function(model.loaded, inputs.records)
                for name, function in inputs.custom.items()
            }
        }
    )
    inputs.bar.advance({"custom": 1})
    return figures


# In the order of measurement. An entry that was not asked for returns nothing.
METRICS: tuple[Callable[[Measured, Inputs], dict], ...] = (
    _predictions,
    _weights_only,
    _size,
    _layers,
    _exact_match,
    _latency,
    _tasks,
    _custom,
)


def _counted(model: Measured, inputs: Inputs) -> Iterator[Batch]:
    """The batches; a pass of the model, and one of its reference, follows each."""
    passes = 1 if model.reference is None else 2
    for batch in model.batches:
        yield batch
        inputs.bar.advance({"tokens": passes * batch.tokens.size})
