"""`lmx.Run`: the results of a run directory."""

import html
import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.loader import find
from ..errors import UserError
from ..pipeline.context import ModelArtifact
from ..run import manifest
from ..run.html.page import NAME as PAGE
from ..run.logger import read_metrics
from ..run.report import RECIPE, REPORT, Record, read_report, read_resolved
from ..run.tables import aligned, metrics_table
from .arguments import PathLike, checked
from .recipe import Recipe


@dataclass(frozen=True)
class Table:
    """Text cells that print aligned and render as HTML in a notebook."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        return "\n".join(aligned([list(self.columns), *map(list, self.rows)]))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Run:
    """A run directory, finished or not. Properties read its files when asked.

    Args:
        path: the folder.

    Raises:
        UserError: it is not a run directory, or its manifest is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(os.path.expanduser(path))
        Record(self.path)

    @property
    def name(self) -> str:
        """The name of the recipe."""
        return str(self._manifest["name"])

    @property
    def status(self) -> str:
        """done, running, failed or interrupted."""
        return str(self._manifest["status"])

    @property
    def model_path(self) -> Path:
        """The checkpoint that the run ended with, for lmx, mlx-lm and LM Studio.

        Raises:
            FileNotFoundError: no stage is complete.
        """
        if (artifact := self.artifact) is None:
            raise FileNotFoundError(f"{self.path}: no stage is complete")
        exported = {path.name: path for path in artifact.published}
        return exported.get("model", artifact.model)

    @property
    def reference_path(self) -> Path | None:
        """The full-precision baseline of a quantized model; None if it has none."""
        artifact = self.artifact
        return artifact.reference if artifact and artifact.is_quantized else None

    @property
    def adapter_path(self) -> Path | None:
        """The trained adapter; None if there is none."""
        artifact = self.artifact
        return artifact.adapters if artifact else None

    @property
    def draft_path(self) -> Path | None:
        """The trained draft model; None if there is none."""
        artifact = self.artifact
        return artifact.draft if artifact else None

    @property
    def report(self) -> Path:
        """The page with all results, report.html."""
        return self.path / PAGE

    @property
    def recipe(self) -> Recipe:
        """The recipe with all values.

        Raises:
            ConfigErrors: files that it names are no longer there.
        """
        return Recipe(self.resolved, overrides={"output": self.path})

    @property
    def resolved(self) -> dict[str, Any]:
        """All values of the recipe, as they were when the run started."""
        values: dict[str, Any] = deepcopy(read_resolved(self.path))
        if values:
            return values
        raise UserError("this run has no resolved.yaml", place=str(self.path))

    @property
    def recipe_path(self) -> Path:
        """The recipe as it was given, recipe.yaml."""
        return self.path / RECIPE

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """Figures of every evaluated model by name, the last one at the end.

        Units: perplexity; loss and kl_mean in nats per token; bytes of the checkpoint;
        fractions for top1_agreement and exact_match. Empty without evaluation.
        """
        models: dict[str, dict[str, Any]] = self._report.get("models", {})
        return models

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: `pandas.DataFrame(run.history)` is a table.

        Every row has `stage`, `kind` (train, valid, ...) and `step`.
        """
        return list(read_metrics(self.path))

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The sample prompts with the models' answers: prompt, expected, answers."""
        samples: list[dict[str, Any]] = self._report.get("samples", [])
        return samples

    @property
    def table(self) -> Table:
        """The metrics, one column per model."""
        return Table(*metrics_table(self.metrics))

    def __str__(self) -> str:
        text = f"{self.name}: {self.status}, {self.path}"
        return f"{text}\n{self.table}" if self.metrics else text

    def __repr__(self) -> str:
        return f"<lmx.Run {self.name}: {self.status}, {self.path}>"

    def _repr_html_(self) -> str:
        title = html.escape(f"{self.name}: {self.status}, {self.path}")
        metrics = self.table._repr_html_() if self.metrics else ""
        return f"<p>{title}</p>{metrics}"

    @property
    def _manifest(self) -> dict[str, Any]:
        content: dict[str, Any] = manifest.read(self.path) or {}
        return content

    @property
    def _report(self) -> dict[str, Any]:
        report: dict[str, Any] = read_report(self.path / REPORT)
        return report

    @property
    def artifact(self) -> ModelArtifact | None:
        """The model that the last complete stage left."""
        stages = self._manifest["stages"]
        if not stages:
            return None
        last = max(stages, key=lambda name: int(name.partition("-")[0]))
        # The folder, file or Hub id of the recipe's model; None if from scratch.
        name = self.resolved["model"]["path"]
        base = name and (find(name, self.path) or Path(name))
        return ModelArtifact.from_json(stages[last]["result"], self.path, base)


@checked
def open_run(path: PathLike) -> Run:
    """The results of a run directory.

    Raises:
        UserError: it is not a run directory, or its manifest is damaged.
    """
    return Run(path)
