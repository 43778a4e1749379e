"""The end of a distill stage: the draft on trial, its figures, gates and folder."""

import json
import platform
import shutil
from dataclasses import replace
from pathlib import Path

from ..data import cache, fingerprint
from ..data.tokenizer_files import require_same_tokenizer
from ..draft import report
from ..draft.benchmark import Candidate, DraftBenchmark, decoding_modes
from ..draft.cost_model import measure_speculation_costs
from ..draft.dataset import mean_prompt_length
from ..draft.report import DraftReport, require_servable
from ..errors import FAILED, UserError
from ..models.checkpoint import checkpoint_size
from ..models.loader import LoadedModel
from ..run.fs import atomic_folder, write_atomic
from .context import ModelArtifact
from .draft_dataset import DraftData

# The measured value that each threshold limits.
DRAFT_THRESHOLDS = {"min_acceptance_rate": "acceptance_rate", "min_speedup": "speedup"}
SHIPPED = "draft"


class DraftEvaluation:
    """Measures a finished draft, as it will be served, beside its target.

    Args:
        schooling: what it was taught with.

    Raises:
        UserError: no engine could serve the sibling beside it.
    """

    def __init__(self, schooling: DraftData):
        self.schooling = schooling
        self.config = schooling.config
        self.context = schooling.context
        self.target = schooling.target
        self.sibling = self._sibling()

    def run(self, folder: Path, facts: dict) -> ModelArtifact:
        """Judge the draft in a folder and publish it.

        Args:
            facts: how it was made.

        Raises:
            UserError: a gate is missed, or no engine could serve the draft.
        """
        context = self.context
        draft = context.load(folder)
        self._require_servable(draft)
        found = self._tried(draft)
        context.logger.table("draft", *found.table())
        context.logger.info(
            f"verdict: {found.recommendation}, {found.speedup:.2f}x measured on this machine, "
            f"{found.num_draft_tokens} guesses a round"
        )
        facts |= {"bytes": checkpoint_size(folder).bytes}
        record = {"draft": found.to_json() | {"training": facts}}
        record["speculation"] = {
            name: {way: vars(column) for way, column in columns.items()}
            for how, trial in found.benchmarks.items()
            for name, columns in trial.by_name(how).items()
        }
        self._report(record)
        self._require(found)
        target = self._publish(folder, found, facts)
        return replace(
            context.current, draft=target, facts=context.current.facts | record
        )

    def _sibling(self) -> LoadedModel | None:
        name = self.config.benchmark.baseline_model
        if name is None:
            return None
        found, own = self.context.load(self.context.named(name)), self.target
        require_same_tokenizer(
            own.tokenizer, found.tokenizer, role="sibling", place=name
        )
        tokens = len(own.tokenizer.get_vocab())
        require_servable(found.config, own.config, tokens, place=name)
        return found

    def _require_servable(self, draft: LoadedModel) -> None:
        ours, theirs, place = draft.tokenizer, self.target.tokenizer, str(draft.path)
        require_same_tokenizer(theirs, ours, role="draft", place=place)
        if ours.chat_template != theirs.chat_template:
            raise UserError("the draft has another chat template", place=place)
        tokens = len(theirs.get_vocab())
        require_servable(draft.config, self.target.config, tokens, place=place)

    def _tried(self, draft: LoadedModel) -> DraftReport:
        config, context, target = self.config.benchmark, self.context, self.target
        rival = self._rival(draft)
        trial = DraftBenchmark(
            target.model,
            rival,
            target.tokenizer,
            {
                name: [prompt.tokens for prompt in own]
                for name, own in self.schooling.suites.items()
            },
            max_tokens=config.max_tokens,
            baseline_model=self.sibling and self._rival(self.sibling),
        )
        trials = {
            name: trial.run(sampling)
            for name, sampling in decoding_modes(
                config.temperature, context.seed
            ).items()
        }
        tokenizer = cache.key_of(fingerprint.tokenizer(target.path))
        digest = self.schooling.digest
        return DraftReport(digest, tokenizer, rival.costs, trials, platform.platform())

    def _rival(self, draft: LoadedModel) -> Candidate:
        prompt = mean_prompt_length(self.schooling.tried)
        return Candidate(
            draft.model,
            measure_speculation_costs(
                self.target.model, draft.model, prompt_length=prompt
            ),
        )

    def _report(self, record: dict) -> None:
        """Add to report.json, which a validate stage may have begun."""
        path = self.context.output / "report.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        empty = {"name": self.context.name, "models": {}, "thresholds": []}
        report = empty | before | record
        write_atomic(path, json.dumps(report, indent=2) + "\n")

    def _require(self, found: DraftReport) -> None:
        missed = [
            f"{name} is {value:.3g}, limit {limit:g}"
            for name, limit in self.config.thresholds.model_dump().items()
            if limit is not None
            and (value := getattr(found, DRAFT_THRESHOLDS[name])) < limit
        ]
        if missed:
            raise UserError(
                f"the draft misses its thresholds: {'; '.join(missed)}; none is published",
                place=str(self.context.folder),
                hint="train longer, on more prompts, or keep more blocks",
                code=FAILED,
            )

    def _publish(self, source: Path, found: DraftReport, facts: dict) -> Path:
        target = self.context.output / SHIPPED
        with atomic_folder(target) as partial:
            shutil.copytree(source, partial, dirs_exist_ok=True)
            report.write_report(partial, found, name=self.context.name, training=facts)
        self.context.logger.info(f"draft: {target}")
        return target
