"""What a stage works with: its folder, the current model, data, logger and ranks."""

import json
import secrets
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import mlx.core as mx

from ..config.data import DataConfig
from ..config.model import ModelConfig
from ..convert.importers import resolve_checkpoint
from ..data.splits import Splits
from ..errors import UserError
from ..files.artifacts import ArtifactStore
from ..files.atomic import PARTIAL, atomic_folder, write_atomic
from ..interfaces import SINGLE_PROCESS, Communicator
from ..models import checkpoint_writer, from_scratch, gguf_scales
from ..models.drafters.mtp import copy_mtp
from ..models.loader import LoadedModel, load
from ..models.safetensors_io import require_finite
from ..quantization.target_layers import QuantizationPlan
from ..run.logger import RunLogger
from ..run.parallel_dims import ParallelDims
from ..run.report import REPORT
from ..run.signals import exit_if_stuck, stop_requested
from .extensions import Extensions

if TYPE_CHECKING:
    from ..training.trainer import Trainer

# Seconds that a step and a checkpoint of several processes may take after SIGTERM.
SHUTDOWN_SECONDS = 300
STOPPING = "stopping after this step, with a checkpoint; Ctrl-C again: at once, without"
VISIBLE_HINT = "put the run directory where all machines see it, with output=..."
PATHS = ("model", "reference", "adapters", "draft", "rounded")

# Artifacts of a stage: models that it begins with.
MODELS, FROM_SCRATCH = "models", "from_scratch"
# The folder of the draft model in the run directory.
DRAFT_FOLDER = "draft"


@dataclass(frozen=True)
class ModelArtifact:
    """The current model as a stage left it on disk.

    Attributes:
        model: the checkpoint folder, which mlx-lm loads.
        reference: its full-precision baseline; the same folder if the model is not
            quantized.
        adapters: folder of the adapter that was trained, if any.
        facts: how the model was made, for the report and the model card.
        draft: folder of the draft model distilled from it, if any.
        published: folders that exports left beside the model.
        rounded: the reference rounded to nearest, to compare the model with, if any.
    """

    model: Path
    reference: Path
    adapters: Path | None = None
    facts: dict = field(default_factory=dict)
    draft: Path | None = None
    published: tuple[Path, ...] = ()
    rounded: Path | None = None

    @property
    def is_quantized(self) -> bool:
        return self.model != self.reference

    def folders_in(self, output: Path) -> list[Path]:
        """The artifact's folders inside the run directory, which have hashes."""
        folders = {getattr(self, name) for name in PATHS}
        folders = {*folders, *self.published} - {None}
        return sorted(path for path in folders if path.is_relative_to(output))

    def result_in(self, output: Path) -> Path | None:
        """The newest model of the run that `lmx generate` loads; None if all models
        are from elsewhere."""
        exported = {path.name: path for path in self.published}
        folders = [exported.get(name) for name in ("model", "hf", "gguf")]
        new = [path for path in (*folders, self.model) if path]
        return next((path for path in new if path.is_relative_to(output)), None)

    def to_json(self, output: Path) -> dict:
        """A record for the manifest, with paths relative to the run directory.

        The recipe's own model is None: its path may be another one on the next run.
        """

        def relative(path: Path | None) -> str | None:
            is_inside = path is not None and path.is_relative_to(output)
            return str(path.relative_to(output)) if is_inside else None

        paths = {name: relative(getattr(self, name)) for name in PATHS}
        published = [relative(path) for path in self.published]
        return paths | {"facts": self.facts, "published": published}

    @classmethod
    def from_json(
        cls, record: dict, output: Path, base: Path | None
    ) -> "ModelArtifact":
        """The artifact of a record that `to_json` made.

        Args:
            base: the folder of the recipe's model.
        """
        paths = {name: record[name] and output / record[name] for name in PATHS}
        paths |= {name: paths[name] or base for name in ("model", "reference")}
        published = tuple(output / path for path in record["published"])
        return cls(**paths, facts=record["facts"], published=published)


def write_model(
    folder: Path,
    loaded: LoadedModel,
    weights: dict[str, mx.array],
    selection: QuantizationPlan | None = None,
    packed: dict[str, mx.array] | None = None,
    *,
    keeps_mtp: bool = True,
) -> None:
    """Write a checkpoint like `loaded`, whole or not at all.

    `weights` and `packed` are emptied, so that a lazily loaded weight that is used
    nowhere else is freed once it is written.

    Args:
        weights: of all layers, not quantized.
        selection: which layers are quantized; None = none.
        packed: codes, scales and biases of the selected layers, and other tensors that
            replace those in `weights`.
        keeps_mtp: copy the multi-token-prediction head of `loaded`, if it has one.
    """
    specs = selection.specs if selection else {}
    for path in specs:
        weights.pop(f"{path}.weight")
    if packed:
        weights |= packed
        packed.clear()
    factors = gguf_scales.of_dense_layers(loaded.path, weights)
    factors |= gguf_scales.take(weights)
    # Layers on grids that MLX lacks are dense in the checkpoint.
    stored = {path: spec.stored for path, spec in specs.items()}
    dense = [path for path, spec in stored.items() if spec is None]
    with atomic_folder(folder) as partial:
        checkpoint_writer.write_checkpoint(
            partial,
            weights,
            loaded.config,
            companions=loaded.path,
            specs={path: spec for path, spec in stored.items() if spec is not None},
            kept=[*(selection.skipped if selection else []), *dense],
            quantize_activations=bool(selection and selection.quantize_activations),
        )
        gguf_scales.write(partial, factors)
        if keeps_mtp:
            copy_mtp(loaded.path, partial, loaded.config)


@dataclass(frozen=True)
class StageContext:
    """The surroundings of a stage.

    Attributes:
        folder: the stage's own folder, which exists.
        output: the run directory.
        source: the recipe's model.
        current: the current model; None while a model from scratch is untrained.
        find: the path of a file that the recipe names; None if there is none.
        rows: training and validation examples, each read when first used.
        parallel: the processes of the run as a mesh.
        extensions: what the caller added in Python.
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
    parallel: ParallelDims = field(default_factory=ParallelDims)
    extensions: Extensions = field(default_factory=Extensions)

    @property
    def ranks(self) -> Communicator:
        """All processes of the run; only rank 0 writes files that all of them see."""
        return self.parallel.world

    @property
    def artifacts(self) -> ArtifactStore:
        """What the stage keeps for its own resume."""
        place = self.folder / "artifacts"
        return ArtifactStore(place, self.logger.warning, self.ranks)

    def load(
        self,
        path: Path,
        compute: str = "auto",
        *,
        lazy: bool = False,
        sharded: bool = False,
    ) -> LoadedModel:
        """Load an MLX checkpoint with the permissions of the recipe.

        Args:
            sharded: this rank's part of it, if the recipe has tensor parallelism. All
                ranks then compute together.
        """
        trust = self.source.trust_remote_code
        group = self.parallel.tensor if sharded else SINGLE_PROCESS
        options = {"compute": compute, "lazy": lazy, "group": group}
        # The first import takes seconds from a slow disk.
        first = "" if "mlx_lm" in sys.modules else "importing mlx-lm, "
        with self.logger.activity(f"{first}reading the weights of {path}"):
            return load(path, trust_remote_code=trust, **options)

    def resolve(self, name: str) -> Path:
        """The MLX folder of another model that the recipe names: see importers."""
        trust = self.source.trust_remote_code
        return resolve_checkpoint(self.find(name) or name, trust_remote_code=trust)

    @cached_property
    def base(self) -> Path | None:
        """The folder of the recipe's model; None if it is from scratch."""
        if self.source.path is None:
            return None
        local = self.find(self.source.path)
        folder = resolve_checkpoint(
            local or self.source.path,
            revision=self.source.revision,
            trust_remote_code=self.source.trust_remote_code,
        )
        # The manifest has absolute paths. A relative one would look like another model.
        return folder.absolute()

    def check_base(self) -> None:
        """Check the recipe's model, if it is the current one.

        Other models were checked when they were written. Warns of dense layers that
        were quantized to blocks that MLX lacks: a stage takes them for unquantized.

        Raises:
            UserError: a tensor has a value that is NaN or infinite.
        """
        if not self.current or self.current.model != self.base:
            return
        require_finite(self.base)
        # It needs NumPy, and reading a recipe imports this module.
        from ..convert.gguf import k_blocks

        for ggml_type, layers in sorted(k_blocks.count_layers(self.base).items()):
            self.logger.warning(
                f"{layers} dense layers of the model were quantized to {ggml_type}: "
                "this stage changes their weights, and they leave these blocks. Start "
                "from the model before it was quantized, if you have it"
            )

    @property
    def initial_model(self) -> Path:
        """The checkpoint that a train stage begins with; see `create_from_scratch`."""
        made = self.artifacts.folder(MODELS, FROM_SCRATCH)
        return self.current.model if self.current else made

    def write_report(self, report: dict) -> None:
        """Write the report of this stage, which is that of the run for now."""
        text = json.dumps(report, indent=2) + "\n"
        for folder in (self.folder, self.output):
            write_atomic(folder / REPORT, text)

    def base_name(self, model: Path) -> str:
        """The name with which other programs load the base of an adapter.

        The Hub id of the recipe's model; else the whole path of an MLX folder. A GGUF
        file has its import in the cache.
        """
        is_on_hub = model == self.base and self.find(self.source.path) is None
        return self.source.path if is_on_hub else str(model.absolute())

    def train(self, trainer: "Trainer") -> float:
        """Train to the end; see `Trainer.train`. Signals and callbacks may stop it."""
        callbacks, several = self.extensions.callbacks, self.ranks.size > 1
        guard = exit_if_stuck(SHUTDOWN_SECONDS) if several else nullcontext()
        with stop_requested(notice=STOPPING) as signalled, guard:
            return trainer.train(lambda: signalled() or callbacks.is_stopped)

    def require_shared_folder(self) -> None:
        """Check that all processes see what rank 0 writes into the stage's folder.

        Every process calls this.

        Raises:
            UserError: this process is on another machine, with another folder.
        """
        ranks, mark = self.ranks, None
        if ranks.size == 1:
            return
        if ranks.is_first:
            # By this name the next run removes it after a kill.
            mark = self.folder / f".shared.{secrets.token_hex(4)}{PARTIAL}"
            mark.touch()
        name = ranks.broadcast_object(mark and mark.name)
        is_seen = ranks.gather_objects((self.folder / name).exists())
        if mark:
            mark.unlink()
        if not is_seen[ranks.rank]:
            raise UserError(
                "all processes write into the folder of this stage, and this machine "
                "sees another one than rank 0",
                place=str(self.folder),
                hint=VISIBLE_HINT,
            )

    def require_visible(self, model: Path) -> Path:
        """The folder of a model that rank 0 wrote.

        Raises:
            UserError: this process is on another machine, without that folder.
        """
        if not self.ranks.is_first and not model.exists():
            raise UserError(
                "rank 0 wrote a model here, and this machine does not see it",
                place=str(model),
                hint=VISIBLE_HINT,
            )
        return model


def create_from_scratch(context: StageContext) -> None:
    """Write a model from scratch: a tokenizer trained on the data, random weights."""

    def make(folder: Path) -> None:
        config = from_scratch.llama_config(context.source.from_scratch)
        weights = from_scratch.initial_weights(config, context.seed)
        context.logger.info("training the tokenizer")
        with TemporaryDirectory() as scratch:
            texts = (row.as_text() for row in context.rows.train)
            size = context.source.from_scratch.vocab_size
            from_scratch.train_tokenizer(texts, size, Path(scratch))
            checkpoint_writer.write_checkpoint(
                folder, weights, config, companions=Path(scratch)
            )

    if not context.current:
        context.artifacts.get_or_make(MODELS, FROM_SCRATCH, make)
