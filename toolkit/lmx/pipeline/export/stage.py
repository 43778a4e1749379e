"""The export stage: write, verify and publish the current model."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ...config.errors import KeyPath
from ...config.export import ExportConfig
from ...config.messages import Problem
from ...convert.exporters import FORMATS, hub
from ...convert.exporters.base import ExportContext
from ...convert.exporters.hub import repository_name, stored_as
from ...convert.exporters.model_card import CardFacts, write_card
from ...data.hub_datasets import HubDataset
from ...errors import UserError
from ...files.atomic import atomic_folder
from ...files.json_files import read_json
from ...models.checkpoint import read_config
from ...models.checkpoint_writer import QUANTIZE_ACTIVATIONS
from ...models.safetensors_io import require_finite
from ...run.report import REPORT, read_report
from ...run.tables import metrics_table
from ..context import ModelArtifact, StageContext
from ..estimate import Estimate, ModelShape, Workload
from ..stage import ModelState, RawStage, Stage, is_missing, looks_local, missing_source

WITHOUT_DRAFT = "an export stage before the draft stage exports the model alone"
# Of an adapter of mlx-lm.
ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")


class ExportStage(Stage):
    """Publish the current model in the recipe's formats, and on the Hub."""

    kind = "export"
    config: ExportConfig

    @property
    def named_models(self) -> dict[str, str]:
        name = self.config.draft_model
        return {"draft_model": name} if name else {}

    @property
    def named_files(self) -> list[tuple[str, str]]:
        name = self.config.adapter_path
        return [("adapter_path", name)] if name else []

    def outputs(self, output: Path) -> list[Path]:
        return [output / FORMATS[name].FOLDER for name in self.config.formats]

    @classmethod
    def check(cls, raw: RawStage, state: ModelState) -> Iterator[Problem]:
        yield from super().check(raw, state)
        adapter, path = raw.value("adapter_path"), (*raw.path, "adapter_path")
        if isinstance(adapter, str):
            if (folder := raw.find(adapter)) is None:
                yield missing_source(path, adapter, raw.find)
            elif not all((folder / name).is_file() for name in ADAPTER_FILES):
                message = f"the folder '{adapter}' has no {' and '.join(ADAPTER_FILES)}"
                yield Problem(path, message, "name the folder adapters/ of a run")
        draft = raw.value("draft_model")
        if isinstance(draft, str) and is_missing(draft, raw.find):
            yield missing_source((*raw.path, "draft_model"), draft, raw.find)
        for path, name in raw.items("formats"):
            if name == "peft" and not (state.has_adapter or adapter):
                hint = "train with `adapter:`, set adapter_path, or leave peft out"
                yield Problem(path, "there is no trained adapter to export", hint)
            if "model_type" in state.config:
                yield from _check_format(path, name, state, draft is not None)

    def estimate(self, workload: Workload, current: ModelShape) -> Estimate:
        # These formats may hold every weight in 16 bits.
        dense = {"hf", "gguf"} & set(self.config.formats)
        disk = current.bytes + len(dense) * 2 * workload.shape.parameters
        return Estimate(current, disk=disk)

    def offline_checks(self) -> Iterator[str]:
        if name := self.config.hub_repo_id:
            hub.require_token(name)
            visibility = "private" if self.config.private else "public"
            yield f"pushed to {name} on the Hub, {visibility}"

    def remote_checks(self) -> None:
        if name := self.config.hub_repo_id:
            hub.require_write_access(name, private=self.config.private)

    def run(self, context: StageContext) -> ModelArtifact:
        """Write and verify every format, then move all of them into place."""
        config, current = self.config, context.current
        adapters = current.adapters
        if config.adapter_path:
            adapters = context.find(config.adapter_path)
        draft = current.draft
        if config.draft_model:
            draft = context.resolve(config.draft_model)
        source = ExportContext(
            name=context.name,
            model=current.model,
            adapters=adapters,
            load=lambda folder: context.load(folder, compute="stored", lazy=True),
            info=context.logger.info,
            draft=draft,
        )
        if current.model == context.base:
            require_finite(current.model)
        targets = dict(zip(config.formats, self.outputs(context.output), strict=True))
        facts = self._card_facts(context)
        with ExitStack() as together:
            for name, target in targets.items():
                partial = together.enter_context(atomic_folder(target))
                with context.logger.activity(f"writing and checking {name}"):
                    FORMATS[name].export(partial, source)
                card, described = FORMATS[name].CARD, facts
                if card.is_adapter and config.adapter_path:
                    # The adapter itself may name its base.
                    base = read_json(adapters / ADAPTER_FILES[0]).get("model")
                    if base:
                        is_local = context.find(base) or looks_local(base, context.find)
                        described = replace(
                            facts, base=None if is_local else base, origin=f"`{base}`"
                        )
                write_card(partial, described, card)
        for name, target in targets.items():
            context.logger.info(f"exported {name}: {target}")
        if name := config.hub_repo_id:
            hub.push(
                targets["mlx"], name, private=config.private, info=context.logger.info
            )
        return replace(current, published=(*current.published, *targets.values()))

    def _card_facts(self, context: StageContext) -> CardFacts:
        report = read_report(context.output / REPORT)
        path = context.source.path
        is_on_hub = path is not None and context.find(path) is None
        # The license that the recipe names, else that of the recipe's model.
        terms = {"license": self.config.license} if self.config.license else {}
        if not terms and context.base is not None:
            terms = hub.license_metadata_of(context.base / "README.md")
            if not terms and is_on_hub:
                terms = hub.license_metadata(path, context.source.revision)
        sources = [HubDataset.parse(s, context.find) for s in context.data.train]
        current = context.current
        trained = {
            "is_trained": path is not None and "trained_tokens" in current.facts,
            "is_qat": bool(current.facts.get("qat")),
        }
        title = (self.config.hub_repo_id or "").rpartition("/")[2]
        return CardFacts(
            title=title
            or repository_name(path or context.name, current.model, **trained),
            name=context.name,
            recipe=(context.output / "recipe.yaml").read_text("utf-8"),
            base=path if is_on_hub else None,
            origin=f"`{path}`" if path else "random weights",
            terms=terms,
            datasets=list(dict.fromkeys(source.name for source in sources if source)),
            stored_as=stored_as(current.model),
            **trained,
            report=report,
            table=metrics_table(report.get("models", {})) if report else ([], []),
            quantize_activations=bool(
                read_config(current.model).get(QUANTIZE_ACTIVATIONS)
            ),
        )


def _check_format(
    path: KeyPath, name: str, state: ModelState, has_other_draft: bool
) -> Iterator[Problem]:
    """The problems of a format with the model, or with its drafter to be trained.

    Args:
        has_other_draft: the stage exports a draft that exists already.
    """
    module = FORMATS.get(name)
    try:
        if require := getattr(module, "check_supported", None):
            require(state.config)
    except UserError as error:
        yield Problem(path, error.message, error.hint)
        return
    require_draft = getattr(module, "check_draft", None)
    if require_draft is None or state.draft is None or has_other_draft:
        return
    try:
        require_draft(state.config, state.draft)
    except UserError as error:
        yield Problem(path, error.message, WITHOUT_DRAFT)
