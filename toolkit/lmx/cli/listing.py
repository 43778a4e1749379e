"""`lmx-train --list`: recipes, stages, methods, formats and trackers by name."""

from pathlib import Path

from ..config.bundled import bundled_recipes
from ..config.messages import fields
from ..config.schema import StageEntry
from ..convert.exporters.registry import FORMATS
from ..quantization.ptq import awq, gptq, rtn
from ..run import wandb_tracker

METHODS = {"rtn": rtn, "gptq": gptq, "awq": awq}


def listing() -> str:
    """The shipped recipes with their first comment, and all that has a name."""
    stages = {kind: info.description for kind, info in fields(StageEntry).items()}
    return "\n\n".join(
        [
            _table(
                "recipes", {n: _comment(path) for n, path in bundled_recipes().items()}
            ),
            _table("stages", stages),
            _table("quantization methods", _summaries(METHODS)),
            _table("export formats", _summaries(FORMATS)),
            _table("trackers", _summaries({"wandb": wandb_tracker})),
        ]
    )


def _summaries(modules: dict) -> dict[str, str]:
    return {name: module.__doc__.splitlines()[0] for name, module in modules.items()}


def _comment(path: Path) -> str:
    lines = path.read_text("utf-8").splitlines()
    return next((x.lstrip("# ") for x in lines if x.startswith("#")), "")


def _table(title: str, rows: dict[str, str]) -> str:
    width = max(map(len, rows), default=0)
    return "\n".join([f"{title}:", *(f"  {k:<{width}}  {v}" for k, v in rows.items())])
