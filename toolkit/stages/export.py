"""The export stage: publish the proven artefact in the formats asked."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ..errors import FAILED, UserError
from ..export import hub
from ..section import Section

if TYPE_CHECKING:
    from .context import Artefact, Context


class Config(Section):
    """Publish the current model."""

    formats: list[Literal["mlx"]] = Field(["mlx"], min_length=1)
    """mlx: a folder stock mlx-lm, LM Studio and mlx-swift load."""
    push_to: str | None = Field(None, pattern=hub.NAME)
    """A repository of the Hugging Face Hub, user/name, where the model goes too."""
    private: bool = True
    """Whether a repository that is made for it is for you alone."""
    license: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9.+-]*$")
    """The Hub's id of the license, as apache-2.0; absent = that of the base model."""


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
        _write_card(partial, config, context)
    context.report.say(f"exported {', '.join(config.formats)}: {target}")
    context.report.say(f'try it: lmx generate {target} --prompt "..."')
    if config.push_to:
        hub.push(target, config.push_to, private=config.private, say=context.report.say)
    return replace(context.current, model=target)


def _write_card(folder: Path, config: Config, context: "Context") -> None:
    from ..data.formats import hub_id
    from ..export.card import write_card
    from .summary import table

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


def _terms(config: Config, context: "Context") -> dict[str, str]:
    """The license the recipe names, else that of the model it starts from."""
    if config.license:
        return {"license": config.license}
    if context.base is None:
        return {}
    source = context.source
    found = hub.terms_of(context.base / "README.md")
    if found or context.find(source.path):
        return found
    return hub.terms(source.path, source.revision)
