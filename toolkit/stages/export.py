"""The export stage: publish the proven artefact in the formats asked."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ..errors import FAILED, UserError
from ..section import Section

if TYPE_CHECKING:
    from .context import Artefact, Context


class Config(Section):
    """Publish the current model."""

    formats: list[Literal["mlx"]] = Field(["mlx"], min_length=1)
    """mlx: a folder stock mlx-lm, LM Studio and mlx-swift load."""


def run(config: Config, context: "Context") -> "Artefact":
    """Copy the artefact to model/, with its card, byte for byte as it was measured."""
    from ..run.files import atomic_folder, hash_folder

    source = context.current.model
    target = context.output / "model"
    with atomic_folder(target) as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True)
        if hash_folder(partial) != hash_folder(source):
            raise UserError(
                "the copy differs from what was measured; is the disk sound?",
                place=str(target),
                code=FAILED,
            )
        _write_card(partial, context)
    context.report.say(f"exported {', '.join(config.formats)}: {target}")
    context.report.say(f'try it: lmx generate {target} --prompt "..."')
    return replace(context.current, model=target)


def _write_card(folder: Path, context: "Context") -> None:
    from ..export.card import write_card
    from ..run.summary import table

    measured = context.output / "report.json"
    report = json.loads(measured.read_text()) if measured.exists() else {}
    path = context.source.path
    on_hub = path is not None and context.find(path) is None
    write_card(
        folder,
        name=context.name,
        recipe=(context.output / "recipe.yaml").read_text(),
        base=path if on_hub else None,
        origin=f"`{path}`" if path else "random weights",
        is_quantized=context.current.is_quantized,
        report=report,
        table=table(report["models"]) if report else ([], []),
    )
