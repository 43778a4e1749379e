"""How a validate stage measures the models of a run and judges the last one."""

import json
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path

from ..config.evaluate import EvaluateConfig
from ..data.batching import Batch, BucketBatchSampler
from ..data.record_formats import DataRecord
from ..data.tokenization import encode_all
from ..errors import FAILED, UserError
from ..evaluation.divergence import measure_divergence
from ..evaluation.exact_match import ExactMatchItem, measure_exact_match
from ..evaluation.latency import measure_latency, measure_speculation
from ..evaluation.lm_eval import is_file, measure_tasks
from ..evaluation.perplexity import measure_perplexity, tokens_at_once
from ..evaluation.weight_error import measure_layers
from ..generation.engine import Generator
from ..generation.speculative.prompt_lookup import PromptLookupProposer
from ..models.checkpoint import checkpoint_size
from ..models.loader import LoadedModel
from ..run.fs import write_atomic
from ..run.tables import table
from .context import StageContext
from .samples import shown_rows

SPEED_PROMPTS = 2
# Facts of a draft, which have entries of their own in the report.
DRAFT = ("draft", "speculation")
PROPOSERS = {"prompt_lookup": PromptLookupProposer}

# Gate: the path of its value among a model's figures, and whether more is better.
THRESHOLDS = {
    "max_kl": "kl_mean",
    "min_top1_agreement": "top1_agreement",
    "max_perplexity": "perplexity",
    "max_perplexity_ratio": "perplexity_ratio",
    "min_exact_match": "exact_match",
}


class Evaluator:
    """Measures the models of a run, one after the other, each beside its reference."""

    def __init__(self, config: EvaluateConfig, context: StageContext):
        self.config = config
        self.context = context
        self.rows = context.rows.valid
        self.figures: dict[str, dict] = {}
        self.shown = shown_rows(self.rows, config.num_samples)
        self._batches: list[Batch] | None = None

    @property
    def folders(self) -> dict[str, Path]:
        """Every different model of the run by name, each after its reference."""
        current, base = self.context.current, self.context.base
        folders = {"base": base} if base else {}
        if current.reference != base:
            folders["fine-tuned"] = current.reference
        if current.is_quantized:
            folders["quantized"] = current.model
        return folders

    def run(self) -> None:
        """Fill `figures` and show them as a table."""
        reference = None
        for name, folder in self.folders.items():
            self.context.logger.info(f"measuring {name}: {folder}")
            loaded = self.context.load(folder)
            self.figures[name] = self._measure(loaded, reference)
            if name == "quantized" and reference:
                self.figures[name]["layers"] = measure_layers(reference, loaded)
            for row in self.shown:
                row.ask(name, Generator(loaded.model, loaded.tokenizer))
            reference = loaded
        self._show()

    def check(self) -> None:
        """Judge the last model by the gates and write report.json."""
        last = list(self.figures)[-1]
        gates = [
            self._gate(name, limit, self.figures[last].get(THRESHOLDS[name]))
            for name, limit in self.config.thresholds.model_dump().items()
            if limit is not None
        ]
        self._write(gates)
        missed = [gate for gate in gates if not gate["passed"]]
        for gate in gates:
            verdict = "passed" if gate["passed"] else "MISSED"
            value = "not measured" if gate["value"] is None else f"{gate['value']:.4g}"
            self.context.logger.info(
                f"threshold {gate['name']}: {value}, limit {gate['limit']:g}: {verdict}"
            )
        if missed:
            names = ", ".join(gate["name"] for gate in missed)
            raise UserError(
                f"the {last} model misses its thresholds: {names}; nothing is published",
                place=str(self.folders[last]),
                hint="train longer, use more bits, or loosen `thresholds`",
                code=FAILED,
            )

    def _gate(self, name: str, limit: float, value: float | None) -> dict:
        more_is_better = name.startswith("min_")
        passed = value is not None and (
            value >= limit if more_is_better else value <= limit
        )
        return {"name": name, "value": value, "limit": limit, "passed": passed}

    def _measure(self, loaded: LoadedModel, reference: LoadedModel | None) -> dict:
        batches = self._encoded(loaded)
        perplexity = measure_perplexity(loaded.model, batches)
        sizes = checkpoint_size(loaded.path)
        figures = {
            "perplexity": perplexity.value,
            "perplexity_stderr": perplexity.stderr,
            "loss": perplexity.loss,
            "tokens": perplexity.tokens,
            "bits_per_weight": sizes.bits_per_weight,
            "bytes": sizes.bytes,
        }
        if reference:
            divergence = measure_divergence(reference.model, loaded.model, batches)
            before = list(self.figures.values())[-1]["perplexity"]
            figures |= vars(divergence)
            figures["perplexity_ratio"] = perplexity.value / before
        generator = Generator(loaded.model, loaded.tokenizer)
        if questions := choose_questions(self.rows, self.config.exact_match_samples):
            accuracy = measure_exact_match(generator, questions)
            figures |= {
                "exact_match": accuracy.overall,
                "exact_match_stderr": accuracy.stderr,
                "exact_match_by_skill": accuracy.by_skill,
            }
        if self.config.tasks:
            figures["tasks"] = measure_tasks(
                loaded, self._tasks, documents=self.config.task_limit
            )
        prompts = [[int(t) for t in b.tokens[0, :-1].tolist()] for b in batches]
        return figures | self._speed(loaded, generator, prompts[-SPEED_PROMPTS:])

    def _speed(self, loaded: LoadedModel, generator: Generator, prompts) -> dict:
        """Of plain decoding, and what every proposer that needs no model gains."""
        length = {"max_tokens": self.config.latency_tokens}
        speed = measure_latency(generator, prompts, **length)
        plain = speed["decode_tokens_per_second"]["p50"]
        speculation = {}
        for name, propose in PROPOSERS.items():
            guessing = Generator(loaded.model, loaded.tokenizer, make_proposer=propose)
            speculation[name] = measure_speculation(
                guessing, prompts, plain=plain, **length
            )
        return {"generation": speed, "speculation": speculation}

    @property
    def _tasks(self) -> list[str | Path]:
        """The names of the tasks, and the places of those that are files."""
        tasks = self.config.tasks
        return [self.context.find(t) or t if is_file(t) else t for t in tasks]

    def _encoded(self, loaded: LoadedModel) -> list[Batch]:
        """The batches every model is measured on, made with the first one's tokenizer.

        The rows are of one base, so all models of a run share its tokenizer.
        """
        if self._batches is None:
            data = self.context.data
            encoded = encode_all(
                self.rows,
                loaded.tokenizer,
                max_seq_length=data.max_seq_length,
                loss_on=data.loss_on,
            )
            batches = BucketBatchSampler(
                encoded.examples,
                max_seq_length=data.max_seq_length,
                tokens=tokens_at_once(loaded.tokenizer.vocab_size),
            )
            self._batches = _enough(batches, self.config.num_tokens)
        return self._batches

    def _show(self) -> None:
        self.context.logger.table(self.context.name, *table(self.figures))

    def _write(self, gates: list[dict]) -> None:
        facts = self.context.current.facts
        report = {
            "name": self.context.name,
            "models": self.figures,
            "training": {k: v for k, v in facts.items() if k not in DRAFT},
            "samples": [row.to_json() for row in self.shown],
            "thresholds": gates,
        } | {key: facts[key] for key in DRAFT if key in facts}
        path = self.context.output / "report.json"
        write_atomic(path, json.dumps(report, indent=2) + "\n")


def _enough(batches: BucketBatchSampler, tokens: int) -> list[Batch]:
    chosen, trained = [], 0
    for batch in batches.in_order():
        chosen.append(batch)
        trained += batch.mask.sum().item()
        if trained >= tokens:
            break
    return chosen


def choose_questions(rows: list[DataRecord], count: int) -> list[ExactMatchItem]:
    """The first rows of every kind of skill, in turn, up to `count`."""
    by_skill: dict[str, list[ExactMatchItem]] = defaultdict(list)
    for row in rows:
        if row.skill and row.messages:
            *asked, answer = row.messages
            question = ExactMatchItem([*asked], answer["content"], row.skill)
            by_skill[row.skill].append(question)
    turns = zip_longest(*(by_skill[skill] for skill in sorted(by_skill)))
    return [question for turn in turns for question in turn if question][:count]
