"""The export stage: publish the proven artefact in the formats asked."""

import json
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

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

    @model_validator(mode="after")
    def _can_be_written(self):
        if len(set(self.formats)) < len(self.formats):
            raise ValueError("a format is named twice")
        if "gguf" in self.formats and not find_spec("gguf"):
            raise ValueError("the format gguf needs its package: pip install gguf")
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
                _write_card(partial, context)
    for name, target in targets.items():
        context.report.say(f"exported {name}: {target}")
    model = targets.get("mlx", current.model)
    context.report.say(f'try it: lmx generate {model} --prompt "..."')
    return replace(current, model=model, published=tuple(targets.values()))


def _write_card(folder: Path, context: "Context") -> None:
    from ..export.card import write_card
    from .summary import table

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
