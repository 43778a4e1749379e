"""The end of a draft stage: benchmark, report, thresholds and draft/."""

import platform
from dataclasses import replace
from pathlib import Path

from ...data import cache, fingerprint
from ...data.tokenizer_files import require_same_tokenizer
from ...draft import report
from ...draft.benchmark import DraftBenchmark, decoding_modes
from ...draft.candidates import Candidate, ModelCandidate
from ...draft.cost_model import SpeculationCosts, measure_speculation_costs
from ...draft.dataset import mean_prompt_length
from ...draft.report import DraftReport, require_servable
from ...errors import FAILED, UserError
from ...files.atomic import atomic_folder, copy_folder
from ...models.checkpoint import checkpoint_size
from ...run.report import REPORT, read_report
from ..context import DRAFT_FOLDER, ModelArtifact
from .setup import DraftData

# The measured value that each threshold limits.
DRAFT_THRESHOLDS = {"min_acceptance_rate": "acceptance_rate", "min_speedup": "speedup"}


def publish_draft(
    data: DraftData, folder: Path, candidate: Candidate, facts: dict
) -> ModelArtifact:
    """Benchmark the draft in a folder, write the report, and publish it.

    Args:
        data: of the distillation.
        candidate: the draft model or drafter of the folder.
        facts: about its training.

    Raises:
        UserError: a threshold is missed.
    """
    config, context, target = data.config.benchmark, data.context, data.target
    size = checkpoint_size(folder).bytes
    costs = draft_costs(data, candidate)
    benchmark = DraftBenchmark(
        target.model,
        candidate,
        costs,
        target.tokenizer,
        {
            name: [prompt.tokens for prompt in prompts]
            for name, prompts in data.prompt_sets.items()
        },
        max_tokens=config.max_tokens,
        logger=context.logger,
    )
    modes = decoding_modes(config.temperature, context.seed)
    results = {name: benchmark.run(sampling) for name, sampling in modes.items()}
    result = DraftReport(
        data.digest,
        cache.key_of(fingerprint.tokenizer(target.path)),
        costs,
        results,
        platform.platform(),
        data.config.architecture,
    )
    context.logger.table("draft", *result.table())
    context.logger.info(
        f"{result.recommendation}: speed-up {result.speedup:.2f}x measured on this "
        f"machine with {result.num_draft_tokens} draft tokens"
    )
    facts |= {"bytes": size}
    record = {"draft": result.to_json() | {"training": facts}}
    record["speculation"] = {
        name: {decoder: vars(stats) for decoder, stats in columns.items()}
        for mode, benchmark in result.benchmarks.items()
        for name, columns in benchmark.by_name(mode).items()
    }
    # An evaluate stage may have begun the report.
    before = read_report(context.output / REPORT)
    empty = {"name": context.name, "models": {}, "thresholds": []}
    context.write_report(empty | before | record)
    missed = [
        f"{name} is {value:.3g}, limit {limit:g}"
        for name, limit in data.config.thresholds.model_dump().items()
        if limit is not None
        and (value := getattr(result, DRAFT_THRESHOLDS[name])) < limit
    ]
    if missed:
        raise UserError(
            f"the draft misses its thresholds: {'; '.join(missed)}; nothing is "
            "published",
            place=str(context.folder),
            hint="train longer, on more prompts, or keep more blocks",
            code=FAILED,
        )
    place = context.output / DRAFT_FOLDER
    with atomic_folder(place) as partial:
        copy_folder(folder, partial)
        report.write_report(partial, result, name=context.name, training=facts)
    context.logger.info(f"draft: {place}")
    facts = context.current.facts | record
    return replace(context.current, draft=place, facts=facts)


def load_draft(data: DraftData, folder: Path) -> ModelCandidate:
    """The draft model in a folder.

    Raises:
        UserError: no engine could serve it.
    """
    draft = data.context.load(folder)
    target, tokenizer = data.target.tokenizer, draft.tokenizer
    place = str(draft.path)
    require_same_tokenizer(target, tokenizer, place=place)
    if tokenizer.chat_template != target.chat_template:
        raise UserError("the draft has another chat template", place=place)
    tokens = len(target.get_vocab())
    require_servable(draft.config, data.target.config, tokens, place=place)
    return ModelCandidate(draft.model)


def draft_costs(data: DraftData, candidate: Candidate) -> SpeculationCosts:
    """Measured costs of the target and of a draft, as they are served."""
    length = mean_prompt_length(data.benchmark_prompts)
    return measure_speculation_costs(data.target.model, candidate, prompt_length=length)
