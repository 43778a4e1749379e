"""Evaluation of a run's models: metrics, samples, thresholds and report.json."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ...config.evaluate import EvaluateConfig
from ...data.answer_filters import FILTERS
from ...data.batching import Batch, BucketBatchSampler
from ...data.chat.rendering import ChatTemplate
from ...data.record_formats import DataRecord
from ...errors import FAILED, UserError
from ...evaluation import lm_eval
from ...evaluation.divergence import measure_divergence
from ...evaluation.exact_match import ExactMatch, ExactMatchItem, measure_exact_match
from ...evaluation.latency import measure_latency, measure_speculation
from ...evaluation.perplexity import Perplexity, eval_batch_tokens, measure_perplexity
from ...evaluation.weight_error import measure_layers
from ...generation.engine import Generator
from ...generation.speculative.prompt_lookup import PromptLookupProposer
from ...models.checkpoint import checkpoint_size
from ...models.loader import LoadedModel
from ...models.qq_linear import full_precision_inputs, has_quantized_inputs
from ...run.tables import table
from ..context import StageContext
from ..train.batches import encode_valid

LATENCY_PROMPTS = 2
SAMPLE_TOKENS = 48
# Words of a text that the models continue.
OPENING_WORDS = 24
# Facts of a draft stage, which are top-level entries of the report.
DRAFT_FACTS = ("draft", "speculation")
PROPOSERS = {"prompt_lookup": lambda _: PromptLookupProposer()}
# The measured value that each threshold limits.
THRESHOLDS = {
    "max_kl": "kl_mean",
    "min_top1_agreement": "top1_agreement",
    "max_perplexity": "perplexity",
    "max_perplexity_ratio": "perplexity_ratio",
    "min_exact_match": "exact_match",
}


class Evaluator:
    """Measures the models of a run one after the other, each against its reference."""

    def __init__(self, config: EvaluateConfig, context: StageContext):
        self.config = config
        self.context = context
        self.rows = context.rows.valid
        self.metrics: dict[str, dict] = {}
        self.samples = choose_samples(self.rows, config.num_samples)
        self._paths: dict[str, Path] = {}
        self._batches: list[Batch] | None = None
        # Of the model measured last, which is the next one's reference.
        self._perplexity: Perplexity | None = None
        self._exact_match: ExactMatch | None = None

    @property
    def folders(self) -> dict[str, Path]:
        """The different models of the run by name, each after its reference."""
        current, base = self.context.current, self.context.base
        folders = {"base": base} if base else {}
        if current.reference != base:
            is_dequantized = current.facts.get("reference_is_dequantized")
            name = "dequantized" if is_dequantized else "fine-tuned"
            folders[name] = current.reference
        if current.is_quantized:
            folders["quantized"] = current.model
        return folders

    @property
    def loaders(self) -> dict[str, Callable[[], LoadedModel]]:
        """Functions that load the models of `folders`."""
        load = self.context.load
        return {name: partial(load, path) for name, path in self.folders.items()}

    def run(self) -> None:
        """Measure the models of the run, and log the metrics as a table."""
        self.measure(self.loaders)
        self.context.logger.table(self.context.name, *table(self.metrics))

    def measure(self, models: dict[str, Callable[[], LoadedModel]]) -> None:
        """Fill `metrics` and `samples`.

        Args:
            models: functions that load the models, each after its reference.
        """
        logger, reference = self.context.logger, None
        with logger.progress(len(models), "evaluating") as bar:
            for number, (name, load) in enumerate(models.items(), 1):
                loaded = load()
                self._paths[name] = loaded.path
                logger.info(f"evaluating {name}: {loaded.path}")
                self.metrics[name] = self._measure(loaded, reference)
                if name == "quantized" and reference:
                    self.metrics[name]["layers"] = measure_layers(reference, loaded)
                for sample in self.samples:
                    sample.generate(name, _generator(loaded))
                reference = loaded
                bar.update(number, perplexity=self.metrics[name]["perplexity"])

    def check(self) -> None:
        """Write report.json, and compare the last model with the thresholds."""
        self._write(self.thresholds())
        self.require_thresholds()

    def require_thresholds(self) -> None:
        """Log the thresholds of the last model.

        Raises:
            UserError: one is missed; its code is 1.
        """
        last, results = list(self.metrics)[-1], self.thresholds()
        for result in results:
            status = "passed" if result["passed"] else "MISSED"
            value = "not measured"
            if result["value"] is not None:
                value = f"{result['value']:.4g}"
            self.context.logger.info(
                f"threshold {result['name']}: {value}, limit {result['limit']:g}: "
                f"{status}"
            )
        if missed := [result["name"] for result in results if not result["passed"]]:
            raise UserError(
                f"the {last} model misses its thresholds: {', '.join(missed)}; nothing "
                "is published",
                place=str(self._paths[last]),
                hint="train longer, use more bits, or loosen `thresholds`",
                code=FAILED,
            )

    def thresholds(self) -> list[dict]:
        """The thresholds of the last model, as in report.json."""
        last = list(self.metrics)[-1]
        return [
            _threshold(name, limit, self.metrics[last].get(THRESHOLDS[name]))
            for name, limit in self.config.thresholds.model_dump().items()
            if limit is not None
        ]

    def _measure(self, loaded: LoadedModel, reference: LoadedModel | None) -> dict:
        batches, logger = self._eval_batches(loaded), self.context.logger
        with logger.progress(len(batches), "perplexity") as bar:
            perplexity = measure_perplexity(loaded.model, bar.track(batches))
        size = checkpoint_size(loaded.path)
        metrics = {
            "perplexity": perplexity.value,
            "perplexity_stderr": perplexity.stderr,
            "loss": perplexity.loss,
            "tokens": perplexity.tokens,
            "bits_per_weight": size.bits_per_weight,
            "bytes": size.bytes,
        }
        if reference:
            with logger.progress(len(batches), "KL divergence") as bar:
                divergence = measure_divergence(
                    reference.model, loaded.model, bar.track(batches)
                )
            metrics |= vars(divergence)
            metrics |= self._without_activations(loaded, reference, batches)
            ratio, ratio_stderr = perplexity.ratio_to(self._perplexity)
            metrics |= {
                "perplexity_ratio": ratio,
                "perplexity_ratio_stderr": ratio_stderr,
            }
        self._perplexity = perplexity
        generator = _generator(loaded)
        if items := self._exact_match_items(loaded, generator):
            result = measure_exact_match(
                generator,
                items,
                max_tokens=self.config.exact_match_max_tokens,
                answer_filter=FILTERS[self.config.exact_match_filter],
            )
            metrics |= {
                "exact_match": result.overall,
                "exact_match_stderr": result.stderr,
                "exact_match_by_skill": result.by_skill,
            }
            if self._exact_match:
                change, change_stderr = result.change_from(self._exact_match)
                metrics |= {
                    "exact_match_change": change,
                    "exact_match_change_stderr": change_stderr,
                }
            self._exact_match = result
        if self.config.tasks:
            metrics["tasks"] = lm_eval.measure_tasks(
                loaded, self._tasks, limit=self.config.task_limit
            )
        if functions := self.context.extensions.metrics:
            metrics["custom"] = {
                name: function(loaded, self.rows)
                for name, function in functions.items()
            }
        prompts = [[int(t) for t in b.tokens[0, :-1].tolist()] for b in batches]
        return metrics | self._latency(loaded, generator, prompts[-LATENCY_PROMPTS:])

    def _without_activations(
        self, loaded: LoadedModel, reference: LoadedModel, batches: list[Batch]
    ) -> dict[str, float]:
        """The divergence of a model with quantized activations if they were not."""
        if not has_quantized_inputs(loaded.model):
            return {}
        with (
            full_precision_inputs(loaded.model),
            self.context.logger.progress(len(batches), "KL without activations") as bar,
        ):
            divergence = measure_divergence(
                reference.model, loaded.model, bar.track(batches)
            )
        return {
            "kl_mean_weights_only": divergence.kl_mean,
            "kl_stderr_weights_only": divergence.kl_stderr,
        }

    def _exact_match_items(
        self, loaded: LoadedModel, generator: Generator
    ) -> list[ExactMatchItem]:
        """The items that every model gets.

        Warnings of long questions and answers are logged for the first model only.
        """
        config = self.config
        chosen = choose_items(
            self.rows, config.exact_match_samples, config.exact_match_filter
        )
        items = [item for item in chosen if _fits(item.prompt(generator), generator)]
        if self.metrics:
            return items
        if len(items) < len(chosen):
            self.context.logger.warning(
                f"exact match leaves out {len(chosen) - len(items)} of {len(chosen)} "
                "questions, which are longer than the model's "
                f"{generator.max_positions} positions"
            )
        limit = config.exact_match_max_tokens
        lengths = [len(loaded.tokenizer.encode(item.answer)) for item in items]
        if max(lengths, default=0) > limit:
            count = sum(length > limit for length in lengths)
            self.context.logger.warning(
                f"exact match generates at most {limit} tokens, and {count} of "
                f"{len(items)} expected answers are longer: raise "
                "exact_match_max_tokens"
            )
        return items

    def _latency(self, loaded: LoadedModel, generator: Generator, prompts) -> dict:
        """Latency of standard decoding, and with every proposer that needs no model."""
        max_tokens = self.config.latency_tokens
        if positions := generator.max_positions:
            # Room for all tokens that are timed.
            prompts = [prompt[: max(1, positions - max_tokens)] for prompt in prompts]
        latency = measure_latency(generator, prompts, max_tokens=max_tokens)
        standard = latency["decode_tokens_per_second"]["p50"]
        speculation = {
            name: measure_speculation(
                _generator(loaded, make_proposer=proposer),
                prompts,
                plain=standard,
                max_tokens=max_tokens,
            )
            for name, proposer in PROPOSERS.items()
        }
        return {"generation": latency, "speculation": speculation}

    @property
    def _tasks(self) -> list[str | Path]:
        """The names of the tasks, and the paths of those that are files."""
        tasks = self.config.tasks
        return [self.context.find(t) or t if lm_eval.is_file(t) else t for t in tasks]

    def _eval_batches(self, loaded: LoadedModel) -> list[Batch]:
        """The batches of every model: all models of a run share one tokenizer."""
        if self._batches is None:
            encoded = encode_valid(self.context, loaded.tokenizer)
            batches = BucketBatchSampler(
                encoded.examples,
                max_seq_length=self.context.data.max_seq_length,
                batch_tokens=eval_batch_tokens(loaded.tokenizer.vocab_size),
            )
            self._batches = _batches_with_tokens(batches, self.config.num_tokens)
        return self._batches

    def _write(self, thresholds: list[dict]) -> None:
        facts = self.context.current.facts
        report = {
            "name": self.context.name,
            "models": self.metrics,
            "training": {k: v for k, v in facts.items() if k not in DRAFT_FACTS},
            "samples": [sample.to_json() for sample in self.samples],
            "thresholds": thresholds,
        } | {key: facts[key] for key in DRAFT_FACTS if key in facts}
        self.context.write_report(report)


def _threshold(name: str, limit: float, value: float | None) -> dict:
    """A threshold's entry in report.json; a value that was not measured misses it."""
    passed = value is not None and (
        value >= limit if name.startswith("min_") else value <= limit
    )
    return {"name": name, "value": value, "limit": limit, "passed": passed}


def _batches_with_tokens(batches: BucketBatchSampler, tokens: int) -> list[Batch]:
    """The first batches that hold this many trained tokens."""
    chosen, trained = [], 0
    for batch in batches.in_order():
        chosen.append(batch)
        trained += batch.mask.sum().item()
        if trained >= tokens:
            break
    return chosen


def choose_items(
    rows: list[DataRecord], count: int, filter_name: str = "none"
) -> list[ExactMatchItem]:
    """The first examples of every skill, in turn, up to `count`.

    Without a filter, only examples with a skill have exactly one correct answer.
    """
    by_skill: dict[str, list[ExactMatchItem]] = defaultdict(list)
    for row in rows:
        *prompt, answer = row.messages or _as_messages(row) or (None,)
        if not prompt or answer["role"] != "assistant" or row.label is False:
            continue
        part = FILTERS[filter_name](answer["content"])
        if part is not None and (row.skill or filter_name != "none"):
            skill = row.skill or "answers"
            chat = row.tools, row.chat_template_kwargs
            item = ExactMatchItem(prompt, answer["content"], skill, *chat)
            by_skill[skill].append(item)
    turns = zip_longest(*(by_skill[skill] for skill in sorted(by_skill)))
    return [item for turn in turns for item in turn if item][:count]


def _as_messages(row: DataRecord) -> tuple[dict, ...]:
    """A prompt and its completion as a chat; empty if the row has no prompt."""
    if not row.prompt:
        return ()
    return (
        {"role": "user", "content": row.prompt},
        {"role": "assistant", "content": row.completion},
    )


@dataclass
class SampleComparison:
    """An example, and what each model of the run generates for it."""

    row: DataRecord
    answers: dict[str, str] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        """The text that the models answer or continue."""
        row = self.row
        if row.messages:
            return "\n".join(str(message["content"]) for message in row.messages[:-1])
        words = (row.text or "").split(maxsplit=OPENING_WORDS)
        return row.prompt or " ".join(words[:OPENING_WORDS])

    @property
    def expected(self) -> str | None:
        """The example's own answer; None for a text, or if it is undesirable."""
        row = self.row
        if row.label is False:
            return None
        return row.messages[-1]["content"] if row.messages else row.completion

    def generate(self, name: str, generator: Generator) -> None:
        """Store a model's greedy answer, without a chain of thought.

        A prompt that is longer than the model's context has no answer.
        """
        messages = [*(self.row.messages or ())][:-1]
        if self.row.prompt and ChatTemplate(generator.tokenizer).exists:
            # As such rows are trained.
            messages = [{"role": "user", "content": self.row.prompt}]
        if messages:
            prompt = generator.encode_chat(
                messages,
                thinking=False,
                tools=self.row.tools,
                template_kwargs=self.row.chat_template_kwargs,
            )
        else:
            prompt = generator.encode_text(self.prompt)
        if _fits(prompt, generator):
            answer = generator.generate(prompt, max_tokens=SAMPLE_TOKENS)
            self.answers[name] = answer.text

    def to_json(self) -> dict:
        """The entry of report.json."""
        return {
            "prompt": self.prompt,
            "expected": self.expected,
            "answers": self.answers,
        }


def choose_samples(rows: list[DataRecord], count: int) -> list[SampleComparison]:
    """The first examples with a prompt of every skill, in turn, up to `count`."""
    by_skill = defaultdict(list)
    for row in rows:
        if SampleComparison(row).prompt.strip():
            by_skill[row.skill].append(row)
    turns = zip_longest(*by_skill.values())
    return [SampleComparison(row) for turn in turns for row in turn if row][:count]


def _fits(prompt: Sequence[int], generator: Generator) -> bool:
    """Whether the model has a position for every token of a prompt."""
    return generator.max_positions is None or len(prompt) <= generator.max_positions


def _generator(loaded: LoadedModel, **options: Any) -> Generator:
    """A generator with the KV-cache bits that the checkpoint names."""
    return Generator(loaded.model, loaded.tokenizer, kv_bits=loaded.kv_bits, **options)
