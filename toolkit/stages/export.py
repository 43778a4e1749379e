"""The export stage: publish the proven artefact in the formats asked."""

import json
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from ..export import hub
from ..registry import entries
from ..section import Section

if TYPE_CHECKING:
    from .context import Artefact, Context

FORMATS = entries("toolkit.export", "FORMAT")


class Config(Section):
    """Publish the current model."""

    formats: list[Literal[tuple(FORMATS)]] = Field(["mlx"], min_length=1)
    """mlx: model/, a folder that stock mlx-lm, LM Studio and mlx-swift load; dense:
    dense/, the same weights unquantized as transformers loads them; peft: peft/, the
    trained adapter; gguf: gguf/NAME.gguf for llama.cpp, of Llama and Qwen models."""
    push_to: str | None = Field(None, pattern=hub.NAME)
    """A repository of the Hugging Face Hub, user/name, where model/ goes too."""
    private: bool = True
    """Whether a repository that is made for it is for you alone."""
    license: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9.+-]*$")
    """The Hub's id of the license, as apache-2.0; absent = that of the base model."""

    @model_validator(mode="after")
    def _can_be_written(self):
        if len(set(self.formats)) < len(self.formats):
            raise ValueError("a format is named twice")
        if "gguf" in self.formats and not find_spec("gguf"):
            raise ValueError("the format gguf needs its package: pip install gguf")
        if self.push_to and "mlx" not in self.formats:
            raise ValueError("push_to is for the format mlx, which formats leaves out")
        return self


def run(config: Config, context: "Context") -> "Artefact":
    """Write all formats, prove each by reading it back, then publish them together."""
    from ..export.published import Published
    from ..run.files import atomic_folder

    current = context.current
    published = Published(
        name=context.name,
        model=current.model,
        adapters=current.adapters,
        load=lambda folder: context.load(folder, compute="stored", lazy=True),
        say=context.report.say,
    )
    targets = {name: context.output / FORMATS[name].FOLDER for name in config.formats}
    with ExitStack() as together:
        for name, target in targets.items():
            partial = together.enter_context(atomic_folder(target))
            FORMATS[name].publish(partial, published)
            if name == "mlx":
                _write_card(partial, config, context)
    for name, target in targets.items():
        context.report.say(f"exported {name}: {target}")
    model = targets.get("mlx", current.model)
    context.report.say(f'try it: lmx generate {model} --prompt "..."')
    if config.push_to:
        hub.push(model, config.push_to, private=config.private, say=context.report.say)
    return replace(current, model=model, published=tuple(targets.values()))


def _write_card(folder: Path, config: Config, context: "Context") -> None:
    from ..data.formats import hub_id
    from ..export.card import write_card
    from ..run.summary import table

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
