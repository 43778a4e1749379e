"""llama.cpp's names of tensors, from the tables of the package `gguf`."""

import re
from functools import cache
from typing import Any

from mlx.utils import tree_flatten

from ...errors import FAILED, UserError
from ...models.loader import build_model
from .architecture import Architecture
from .architectures import TEXT_PART

# Parts of mlx-lm's names, and what the package knows instead.
PACKAGE_PARTS = {
    ".switch_mlp.": ".experts.",
    ".block_sparse_moe.experts.": ".mlp.experts.",
    ".embed_q.": ".k_b_proj.",
    ".unembed_out.": ".v_b_proj.",
    ".e_score_correction_bias": ".e_score_correction.bias",
    ".expert_bias": ".expert_bias.bias",
    ".sinks": ".sinks.weight",
}
BLOCK = re.compile(r"model\.layers\.(\d+)\.")


def stored_name(name: str, architecture: Architecture) -> str:
    """llama.cpp's name of a tensor of mlx-lm.

    Raises:
        UserError: llama.cpp has none in this architecture.
    """
    known = name.removeprefix(TEXT_PART)
    block = BLOCK.match(known)
    known = BLOCK.sub("model.layers.0.", known)
    for part, other in PACKAGE_PARTS.items():
        known = known.replace(part, other)
    path, _, leaf = known.rpartition(".")
    stored = architecture.own_names.get(path) or _table(architecture.name).get_name(
        path
    )
    if stored is None or leaf not in ("weight", "bias"):
        raise UserError(f"GGUF has no name for the tensor {name}", code=FAILED)
    if block:
        stored = stored.replace("blk.0.", f"blk.{block[1]}.")
    return f"{stored}.{leaf}"


def mlx_names(config: dict, architecture: Architecture) -> dict[str, str]:
    """mlx-lm's names of the tensors of a model, by llama.cpp's names."""
    parameters = tree_flatten(build_model(config).parameters())
    return {stored_name(name, architecture): name for name, _ in parameters}


@cache
def _table(name: str) -> Any:
    """The package's names for an architecture of one block."""
    import gguf

    known = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    # The package has no drafters. Their layers are those of Qwen 3.
    return gguf.get_tensor_name_map(known.get(name, gguf.MODEL_ARCH.QWEN3), 1)
