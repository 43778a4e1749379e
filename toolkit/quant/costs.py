"""What errors will cost, looked at before anything is quantized.

Of embeddings, as moments of inputs; of layers in the blocks, the Fisher information of
what comes out of them, on disk until their block's turn has come.
"""

from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import mlx.nn as nn

from ..model.blocks import differentiable
from ..model.blockwise import Blockwise
from .embeddings import embeddings, heads, moments_of_embeddings
from .fisher import ThereAndBack
from .inputs import Moments

# Tokens whose slopes are taken, for each column of an embedding, and for each output.
TOKENS_PER_COLUMN = 1
TOKENS_PER_OUTPUT = 8
# And no more in all: their hidden states are on disk in front of every block.
MOST_TOKENS = 1 << 13
# A layer with more, or so many times as many as inputs, is solved row by row: a matrix
# that wide is large, and the layers that widen a block gain least by it.
MOST_OUTPUTS, MOST_TIMES = 4096, 2


def look_ahead(
    blockwise: Blockwise,
    paths: list[str],
    inside: list[list[str]],
    parts: list[mx.array],
    *,
    compute: mx.Dtype,
    folder: Path,
) -> dict[str, Moments]:
    """Send tokens through the model and the slopes of their loss back.

    Args:
        paths: of embeddings.
        inside: of layers in every block whose outputs count; what is found of them is
            for `answers`.
        parts: tokens, int32 [B, L] each.
        compute: the type to run blocks in.
        folder: for what is found, and for hidden states meanwhile.

    Returns:
        By path of an embedding what errors in it cost, as moments of its inputs.

    Raises:
        UserError: the disk has no room.
    """
    outputs = [
        _outputs(block, names)
        for block, names in zip(blockwise.blocks, inside, strict=True)
    ]
    sizes = [size for own in outputs for size in own.values()]
    widths = [w.shape[-1] for w in embeddings(blockwise.model, paths).values()]
    if not sizes and not widths:
        return {}
    wanted = [TOKENS_PER_COLUMN * width for width in widths]
    wanted += [TOKENS_PER_OUTPUT * size for size in sizes]
    back = min(len(parts), ceil(min(max(wanted), MOST_TOKENS) / parts[0].size))
    with TemporaryDirectory(dir=folder) as place, differentiable(blockwise.model):
        way = ThereAndBack(blockwise, parts, back, compute, Path(place))
        also = heads(way, paths) if paths else []
        if not also:
            way.parts = way.parts[:back]
        way.forward(besides=sum(4 * size**2 for size in sizes))
        way.turn()
        for number, found in way.backward([list(own) for own in outputs]):
            if found:
                mx.save_safetensors(str(_file(folder, number)), found)
        return moments_of_embeddings(way, paths, also)


def answers(folder: Path, number: int) -> dict[str, mx.array]:
    """What `look_ahead` found of a block: float32 [N, N] by path in it, unread."""
    file = _file(folder, number)
    return mx.load(str(file)) if file.is_file() else {}


def drop_answers(folder: Path, number: int) -> None:
    """Delete what was found of a block, once that is done."""
    _file(folder, number).unlink(missing_ok=True)


def _file(folder: Path, number: int) -> Path:
    return folder / f"answers-{number:04d}.safetensors"


def _outputs(block: nn.Module, paths: list[str]) -> dict[str, int]:
    """How many outputs layers of one matrix have, of those with not too many."""
    modules = dict(block.named_modules())
    shapes = {path: modules[path].weight.shape for path in paths}
    matrices = {path: shape for path, shape in shapes.items() if len(shape) == 2}
    return {
        path: outputs
        for path, (outputs, inputs) in matrices.items()
        if outputs <= min(MOST_OUTPUTS, MOST_TIMES * inputs)
    }
