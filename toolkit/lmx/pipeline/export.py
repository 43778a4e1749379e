"""The export stage: publish the proven artefact in the formats asked."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.export import ExportConfig
from ..convert.exporters import FORMATS, hub

if TYPE_CHECKING:
    from .context import ModelArtifact, StageContext


def run(config: ExportConfig, context: "StageContext") -> "ModelArtifact":
    """Write all formats, prove each by reading it back, then publish them together."""
    from ..convert.exporters.base import ExportContext
    from ..run.fs import atomic_folder

    current = context.current
    published = ExportContext(
        name=context.name,
        model=current.model,
        adapters=current.adapters,
        load=lambda folder: context.load(folder, compute="stored", lazy=True),
        info=context.logger.info,
    )
    targets = {name: context.output / FORMATS[name].FOLDER for name in config.formats}
    with ExitStack() as together:
        for name, target in targets.items():
            partial = together.enter_context(atomic_folder(target))
            FORMATS[name].export(partial, published)
            if name == "mlx":
                _write_card(partial, config, context)
    for name, target in targets.items():
        context.logger.info(f"exported {name}: {target}")
    model = targets.get("mlx", current.model)
    context.logger.info(f'try it: lmx generate {model} --prompt "..."')
    if config.hub_repo_id:
        hub.push(
            model, config.hub_repo_id, private=config.private, info=context.logger.info
        )
    return replace(current, model=model, published=tuple(targets.values()))


def _write_card(folder: Path, config: ExportConfig, context: "StageContext") -> None:
    from ..convert.exporters.model_card import write_card
    from ..data.dataset import hub_id
    from ..run.tables import table

    measured = context.output / "report.json"
    report = json.loads(measured.read_text()) if measured.exists() else {}
    path = context.source.path
    on_hub = path is not None and context.find(path) is None
    ids = [hub_id(source, context.find) for source in context.data.train]
    write_card(
        folder,
        name=context.name,
        recipe=(context.output / "recipe.yaml").read_text(),
        base=path if on_hub else None,
        origin=f"`{path}`" if path else "random weights",
        terms=_terms(config, context),
        datasets=list(dict.fromkeys(found[0] for found in ids if found)),
        is_quantized=context.current.is_quantized,
        report=report,
        table=table(report["models"]) if report else ([], []),
    )


def _terms(config: ExportConfig, context: "StageContext") -> dict[str, str]:
    """The license the recipe names, else that of the model it starts from."""
    if config.license:
        return {"license": config.license}
    if context.base is None:
        return {}
    source = context.source
    found = hub.license_metadata_of(context.base / "README.md")
    if found or context.find(source.path):
        return found
    return hub.license_metadata(source.path, source.revision)
