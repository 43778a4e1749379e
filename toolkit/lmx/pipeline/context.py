"""What a stage is given: where it works, what it reads, whom it tells."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import mlx.core as mx

from ..config.data import DataConfig
from ..config.model import ModelConfig
from ..convert.importers import resolve_checkpoint
from ..data.splits import Splits
from ..errors import UserError
from ..models import checkpoint_writer
from ..models.loader import LoadedModel, load
from ..quantization.target_layers import QuantizationPlan
from ..run.distributed import SINGLE_PROCESS, ProcessGroup
from ..run.fs import atomic_folder
from ..run.logger import RunLogger

PATHS = ("model", "reference", "adapters", "draft")


@dataclass(frozen=True)
class ModelArtifact:
    """A model a stage left on disk.

    Attributes:
        model: the checkpoint folder, which mlx-lm loads.
        reference: its unquantized twin; the same folder when nothing is quantized.
        adapters: folder of the adapter that was trained, if any.
        facts: what the report and the model card tell of how it was made.
        draft: folder of the draft model that was distilled from it, if any.
        published: folders that an export left beside the model.
    """

    model: Path
    reference: Path
    adapters: Path | None = None
    facts: dict = field(default_factory=dict)
    draft: Path | None = None
    published: tuple[Path, ...] = ()

    @property
    def is_quantized(self) -> bool:
        return self.model != self.reference

    def to_json(self, output: Path) -> dict:
        """A record for the manifest; paths in the run folder are relative to it."""

        def relative(path: Path | None) -> str | None:
            if path is None:
                return None
            inside = path.is_relative_to(output)
            return str(path.relative_to(output) if inside else path.absolute())

        paths = {name: relative(getattr(self, name)) for name in PATHS}
        published = [relative(path) for path in self.published]
        return paths | {"facts": self.facts, "published": published}

    @classmethod
    def from_json(cls, record: dict, output: Path) -> "ModelArtifact":
        """What `to_json` recorded."""
        paths = {name: record[name] and output / record[name] for name in PATHS}
        published = tuple(output / path for path in record["published"])
        return cls(**paths, facts=record["facts"], published=published)


def write_model(
    folder: Path,
    loaded: LoadedModel,
    weights: dict[str, mx.array],
    selection: QuantizationPlan | None = None,
    packed: dict[str, mx.array] | None = None,
) -> None:
    """Write a checkpoint like `loaded`, whole or not at all.

    Args:
        weights: of all layers, dense.
        selection: what is quantized; None = nothing.
        packed: codes, scales and biases that take the place of the weights selected,
            and what else takes the place of a weight. Both are emptied on the way, so
            that what is unread and in no other place is let go once it is written.
    """
    specs = selection.specs if selection else {}
    for path in specs:
        weights.pop(f"{path}.weight")
    if packed:
        weights |= packed
        packed.clear()
    with atomic_folder(folder) as partial:
        checkpoint_writer.write_checkpoint(
            partial,
            weights,
            loaded.config,
            companions=loaded.path,
            specs=specs,
            kept=list(selection.kept) if selection else [],
        )


@dataclass(frozen=True)
class StageContext:
    """A stage's surroundings.

    Attributes:
        folder: the stage's own folder, which exists.
        output: the run folder.
        source: the recipe's model.
        current: the model artefact so far; None while a fresh model is untrained.
        find: the path of a file the recipe names.
        rows: training and validation rows, each read when first asked for.
        ranks: the processes of the run; only the first one writes.
    """

    folder: Path
    output: Path
    name: str
    source: ModelConfig
    data: DataConfig
    seed: int
    current: ModelArtifact | None
    logger: RunLogger
    find: Callable[[str], Path | None]
    rows: Splits
    ranks: ProcessGroup = SINGLE_PROCESS

    def load(
        self, path: Path, compute: str = "auto", *, lazy: bool = False
    ) -> LoadedModel:
        """Load a checkpoint with the permissions the recipe gives."""
        trust = self.source.trust_remote_code
        return load(path, trust_remote_code=trust, compute=compute, lazy=lazy)

    def named(self, name: str) -> Path:
        """The folder of another model that the recipe names, fetched if need be."""
        trust = self.source.trust_remote_code
        return resolve_checkpoint(self.find(name) or name, trust_remote_code=trust)

    @cached_property
    def base(self) -> Path | None:
        """The folder of the recipe's model; None for a fresh one."""
        if self.source.path is None:
            return None
        local = self.find(self.source.path)
        folder = resolve_checkpoint(
            local or self.source.path,
            revision=self.source.revision,
            trust_remote_code=self.source.trust_remote_code,
        )
        # As the manifest has it, or a stage would take it for another model.
        return folder.absolute()

    def called(self, model: Path) -> str:
        """The folder of a model; of the recipe's own what the recipe calls it."""
        return self.source.path if model == self.base else str(model)

    def visible(self, model: Path) -> Path:
        """The folder of a model that the first process left, if it is seen from here.

        Raises:
            UserError: this process is on another machine, without that folder.
        """
        if not self.ranks.is_first and not model.exists():
            raise UserError(
                "the first process left a model here that this machine does not see",
                place=str(model),
                hint="put the run folder where all machines see it, with output=...",
            )
        return model
