"""What the formats are given, of checkpoints made in tests."""

from functools import partial

from lmx.convert.exporters.base import ExportContext
from lmx.models import checkpoint_writer
from lmx.models.loader import load
from mlx.utils import tree_flatten


def publish(module, model, target, *, adapters=None):
    """A format's folder of a model; what it said."""
    said = []
    target.mkdir()
    opened = partial(load, compute="stored", lazy=True)
    module.publish(target, ExportContext("name", model, adapters, opened, said.append))
    return said


def rounded(source, target, packed):
    """A checkpoint with codes, by path: (tensors by leaf, their spec)."""
    loaded = load(source, compute="stored")
    weights = dict(tree_flatten(loaded.model.parameters()))
    for path, (tensors, _) in packed.items():
        weights |= {f"{path}.{leaf}": value for leaf, value in tensors.items()}
    specs = {path: spec for path, (_, spec) in packed.items()}
    target.mkdir()
    checkpoint_writer.write_checkpoint(
        target, weights, loaded.config, companions=loaded.path, specs=specs
    )
    return target
