"""Tiny drafters in folders, for targets that the GGUF export supports."""

import mlx.core as mx
import numpy as np
from gguf_models import config_of
from lmx.config.draft import DrafterConfig
from lmx.models.drafters.base import TargetHead
from lmx.models.drafters.io import ARCHITECTURES, save_drafter
from lmx.models.loader import load
from mlx.utils import tree_map

VOCABULARY, DRAFT_VOCABULARY = 320, 60
LAYER_IDS = [0, 1, 2]
OPTIONS = {
    "eagle3": {"draft_vocab_size": DRAFT_VOCABULARY, "layer_ids": LAYER_IDS},
    "dflash": {"num_layers": 2, "layer_ids": [0, 2], "num_draft_tokens": 4},
}


def target_folder(make_checkpoint, name="llama", **changes):
    """The folder of a random target of four blocks, with weights in 32 bits."""
    return make_checkpoint(config_of(name) | changes, dtype="float32")


def random_drafter(kind, target, *, changes=None, **options):
    """A drafter for a loaded target, with weights that are all different.

    Args:
        changes: of the config of the drafter.
    """
    cls = ARCHITECTURES[kind]
    config = cls.config_class.for_target(
        target.config,
        DrafterConfig(**(OPTIONS[kind] | options)),
        width=target.config["hidden_size"],
        vocab_size=VOCABULARY,
        num_blocks=len(target.model.layers),
        mask_token_id=7,
    )
    mx.random.seed(7)
    drafter = cls(config.model_copy(update=changes or {}))
    drafter.choose_vocabulary(np.random.default_rng(0).integers(0, 9, VOCABULARY))
    drafter.update(
        tree_map(
            lambda w: w + 0.2 * mx.random.normal(w.shape),
            drafter.trainable_parameters(),
        )
    )
    return drafter.bind(TargetHead(target.model))


def drafter_folder(folder, kind, source, *, dtype=mx.float32, **options):
    """The folder of a random drafter for the target in the folder `source`."""
    folder.mkdir()
    save_drafter(folder, random_drafter(kind, load(source), **options), dtype)
    return folder
