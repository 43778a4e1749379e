"""Evaluation of a run's models, one after the other, each against its reference."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...config.evaluate import EvaluateConfig
from ...cpu.memory import available_memory
from ...data.answer_filters import SHORT
from ...data.batching import Batch, BucketBatchSampler
from ...errors import FAILED, UserError
from ...evaluation import lm_eval
from ...evaluation.perplexity import eval_batch_tokens
from ...generation.kv_cache.eviction import kv_limit
from ...generation.thinking import NO_THINKING, thinking_of
from ...models.loader import LoadedModel
from ...run.tables import metrics_table
from ..context import StageContext
from ..train.batches import encode_valid
from .metrics import METRICS, Inputs, Measured
from .planned_work import PlannedWork
from .questions import Questions, fits

# The name of a model that is rounded to nearest, which is nothing's reference.
ROUNDED = "rounded"
# Tokens per batch: larger batches are not faster.
MAX_BATCH_TOKENS = 4096
# Samples that the log shows.
LOGGED_SAMPLES = 2
# Facts of a draft stage, which are top-level entries of the report.
DRAFT_FACTS = ("draft", "speculation")
# What a question for exact match has, by `exact_match.filter`.
NEEDED = {
    "none": f"answer is JSON or a line of at most {SHORT} characters",
    "flexible-extract": "answer has a number",
}
# The measured value that each threshold limits.
THRESHOLDS = {
    "max_kl": "kl_mean",
    "min_top1_agreement": "top1_agreement",
    "max_perplexity": "perplexity",
    "max_perplexity_ratio": "perplexity_ratio",
    "min_exact_match": "exact_match",
}


class Evaluator:
    """Measures models, and compares the last one with the thresholds.

    All processes measure, each its share. Rank 0 has all figures.

    Attributes:
        metrics: figures by model, as in report.json.
    """

    def __init__(self, config: EvaluateConfig, context: StageContext):
        self.config = config
        self.context = context
        self.metrics: dict[str, dict] = {}
        self.questions = Questions.choose(
            context.rows.valid,
            config.num_samples,
            config.exact_match.samples,
            config.exact_match.filter,
        )
        self.questions.thinking_budget = config.thinking_budget
        self._last = Path()

    @property
    def samples(self) -> list[dict]:
        """Prompts with the models' answers, as in report.json."""
        return [question.to_json() for question in self.questions.samples]

    @property
    def folders(self) -> dict[str, Path]:
        """The different models of the run by name, each after its reference."""
        current, base = self.context.current, self.context.base
        folders = {"base": base} if base else {}
        if current.reference != base:
            is_dequantized = current.facts.get("reference_is_dequantized")
            name = "dequantized" if is_dequantized else "fine-tuned"
            folders[name] = current.reference
        if current.rounded:
            folders[ROUNDED] = current.rounded
        if current.is_quantized:
            folders["quantized"] = current.model
        return folders

    @property
    def loaders(self) -> dict[str, Callable[[], LoadedModel]]:
        """Functions that load the models of `folders`."""
        context = self.context

        def load(path: Path) -> LoadedModel:
            return context.load(context.require_visible(path), sharded=True)

        return {name: partial(load, path) for name, path in self.folders.items()}

    def measure(self, models: dict[str, Callable[[], LoadedModel]]) -> None:
        """Fill `metrics` and the answers to the questions.

        Args:
            models: functions that load the models, each after its reference.
        """
        config, context = self.config, self.context
        (name, load), *others = models.items()
        start = time.monotonic()
        loaded = load()
        load_seconds = time.monotonic() - start
        tensor, kv_memory = context.parallel.tensor, None
        limit = kv_limit(config.max_kv_size, config.kv_policy)
        if tensor.size > 1:
            # Half of what is left, because another model is loaded beside this one.
            kv_memory = min(tensor.gather_objects(available_memory() // 2))
        batches = self._batches(loaded)
        reference = first = Measured(name, loaded, batches, None, limit, kv_memory)
        self._check_questions(first)
        metrics = context.extensions.metrics
        uncounted = {
            "latency": config.latency_tokens,
            "tasks": config.tasks,
            "custom": metrics,
        }
        work = PlannedWork(
            config,
            self.questions,
            batches,
            first.generator(),
            load_seconds,
            models,
            [name for name, asked in uncounted.items() if asked],
            context.parallel.data.size,
        )
        with context.logger.progress(work.kinds, "evaluating", percent=True) as bar:
            inputs = Inputs(
                config,
                context.rows.valid,
                self.questions,
                [
                    context.find(t) or t if lm_eval.is_file(t) else t
                    for t in config.tasks
                ],
                dict(metrics),
                context.parallel,
                work,
                bar,
            )
            self._measure(first, inputs)
            del first, loaded
            for name, load in others:
                model = Measured(name, load(), batches, reference, limit, kv_memory)
                bar.advance({"models": 1})
                self._measure(model, inputs)
                # Two models are in memory at once.
                model.reference = None
                if name != ROUNDED:
                    reference = model

    def check(self) -> None:
        """Log the table and samples, write report.json, compare with the thresholds.

        Raises:
            UserError: a threshold is missed; its code is 1.
        """
        logger, facts = self.context.logger, self.context.current.facts
        logger.table(self.context.name, *metrics_table(self.metrics))
        for sample in self.samples[:LOGGED_SAMPLES]:
            logger.info(f"prompt: {sample['prompt']}")
            for name, answer in sample["answers"].items():
                logger.info(f"  {name}: {answer}")
        report = {
            "name": self.context.name,
            "models": self.metrics,
            "training": {k: v for k, v in facts.items() if k not in DRAFT_FACTS},
            "samples": self.samples,
            "thresholds": self._thresholds,
        } | {key: facts[key] for key in DRAFT_FACTS if key in facts}
        self.context.write_report(report)
        self.require_thresholds()

    def require_thresholds(self) -> None:
        """Log the thresholds of the last model.

        Raises:
            UserError: one is missed; its code is 1.
        """
        results = self._thresholds
        for result in results:
            status = "passed" if result["passed"] else "MISSED"
            value = result["value"]
            value = "not measured" if value is None else f"{value:.4g}"
            self.context.logger.info(
                f"threshold {result['name']}: {value}, limit {result['limit']:g}: "
                f"{status}"
            )
        if missed := [result["name"] for result in results if not result["passed"]]:
            raise UserError(
                f"the {[*self.metrics][-1]} model misses its thresholds: "
                f"{', '.join(missed)}; nothing is published",
                place=str(self._last),
                hint="train longer, use more bits, or loosen `thresholds`",
                code=FAILED,
            )

    @property
    def _thresholds(self) -> list[dict]:
        """The entries of report.json. A value that was not measured misses."""
        figures, results = [*self.metrics.values()][-1], []
        for name, limit in self.config.thresholds.model_dump().items():
            if limit is None:
                continue
            value = figures.get(THRESHOLDS[name])
            bounds = (limit, value) if name.startswith("min_") else (value, limit)
            passed = value is not None and bounds[0] <= bounds[1]
            result = {"name": name, "value": value, "limit": limit, "passed": passed}
            results.append(result)
        return results

    def _measure(self, model: Measured, inputs: Inputs) -> None:
        self.context.logger.info(f"evaluating {model.name}: {model.loaded.path}")
        self._last = model.loaded.path
        figures = self.metrics[model.name] = {}
        inputs.bar.advance({}, note=model.name)
        for metric in METRICS:
            figures |= metric(model, inputs)
            inputs.bar.skip_time()
        inputs.work.end_model(model.name)

    def _batches(self, loaded: LoadedModel) -> list[Batch]:
        """The first batches that hold the trained tokens to measure.

        All models of a run share one tokenizer.
        """
        encoded = encode_valid(self.context, loaded.tokenizer)
        limit = eval_batch_tokens(loaded.tokenizer.vocab_size)
        batches = BucketBatchSampler(
            encoded.examples,
            max_seq_length=self.context.data.max_seq_length,
            # A larger batch would measure more than what is asked for.
            batch_tokens=min(limit, self.config.num_tokens, MAX_BATCH_TOKENS),
        )
        chosen, trained = [], 0
        for batch in batches.in_order():
            chosen.append(batch)
            trained += batch.mask.sum().item()
            if trained >= self.config.num_tokens:
                break
        return chosen

    def _check_questions(self, model: Measured) -> None:
        """Say why there are no questions, or warn of those that are too long.

        Raises:
            UserError: the models cannot think as they should.
        """
        generator, exact = model.generator(), self.questions.exact
        has_budget = self.config.thinking_budget is not None
        if has_budget and thinking_of(generator.tokenizer, []) is None:
            raise UserError(NO_THINKING, place="thinking_budget of evaluate")
        if self.config.exact_match.samples and not exact:
            needed = NEEDED[self.config.exact_match.filter]
            self.context.logger.info(f"exact match is not measured: no {needed}")
        prompts = self.questions.prompts(generator)
        fitting = [q for q in exact if fits(prompts[q], generator)]
        if len(fitting) < len(exact):
            self.context.logger.warning(
                f"exact match leaves out {len(exact) - len(fitting)} of {len(exact)} "
                "questions, which are longer than the model's "
                f"{generator.max_positions} positions"
            )
        limit = self.config.max_tokens
        encode = model.loaded.tokenizer.encode
        count = sum(len(encode(q.expected)) > limit for q in fitting)
        if count:
            self.context.logger.warning(
                f"exact match generates at most {limit} tokens, and {count} of "
                f"{len(fitting)} expected answers are longer: raise "
                "max_tokens of evaluate"
            )
