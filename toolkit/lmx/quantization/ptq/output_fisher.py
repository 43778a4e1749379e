"""What errors will cost, looked at before anything is quantized.

Of embeddings, as moments of inputs; of layers in the blocks, the Fisher information of
what comes out of them and how much every token matters to them, on disk until their
block's turn has come.
"""

from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import mlx.nn as nn

from ...models.blockwise import BlockwiseModel
from ...models.hooks import differentiable
from .embeddings import embeddings, heads, moments_of_embeddings
from .fisher import ForwardBackwardPass
from .input_statistics import InputStatistics

# Tokens whose slopes are taken, for each column of an embedding, and for each output.
TOKENS_PER_COLUMN = 1
TOKENS_PER_OUTPUT = 8
# And no more in all: their hidden states are on disk in front of every block.
MOST_TOKENS = 1 << 13
# Where tokens do not count alike, the first ones of which each is looked at.
MOST_TOKENS_WEIGHED = 1 << 16
# A layer with more, or so many times as many as inputs, is solved row by row: a matrix
# that wide is large, and the layers that widen a block gain least by it.
MOST_OUTPUTS, MOST_TIMES = 4096, 2


def backward_sensitivity_pass(
    blockwise: BlockwiseModel,
    paths: list[str],
    inside: list[list[str]],
    parts: list[mx.array],
    counted: list[mx.array],
    *,
    compute: mx.Dtype,
    folder: Path,
) -> dict[str, InputStatistics]:
    """Send tokens through the model and the slopes of their loss back.

    Args:
        paths: of embeddings.
        inside: of layers in every block whose outputs count; what is found of them is
            for `answers`.
        parts: tokens, int32 [B, L] each.
        counted: bool [B, L] each, where what is predicted counts.
        compute: the type to run blocks in.
        folder: for what is found, and for hidden states meanwhile.

    Returns:
        By path of an embedding what errors in it cost, as moments of its inputs.

    Raises:
        UserError: the disk has no room.
    """
    every = all(part.all().item() for part in counted)
    outputs = [
        _outputs(block, names, with_wide=not every)
        for block, names in zip(blockwise.blocks, inside, strict=True)
    ]
    sizes = [size for own in outputs for size in own.values() if size]
    widths = [w.shape[-1] for w in embeddings(blockwise.model, paths).values()]
    if not any(outputs) and not widths:
        return {}
    wanted = [TOKENS_PER_COLUMN * width for width in widths]
    wanted += [TOKENS_PER_OUTPUT * size for size in sizes]
    wanted = min(max(wanted, default=0), MOST_TOKENS) if every else MOST_TOKENS_WEIGHED
    back = min(len(parts), ceil(wanted * len(parts) / sum(p.size for p in parts)))
    with TemporaryDirectory(dir=folder) as place, differentiable(blockwise.model):
        way = ForwardBackwardPass(blockwise, parts, counted, back, compute, Path(place))
        also = heads(way, paths) if paths else []
        if not also:
            way.parts, way.counted = way.parts[:back], way.counted[:back]
        way.forward(besides=sum(4 * size**2 for size in sizes))
        way.turn()
        asked = [{path: size > 0 for path, size in own.items()} for own in outputs]
        for number, found in way.backward(asked):
            tensors = {f"answers.{k}": v for k, v in found.information.items()}
            if not every:
                squares = found.squares.items()
                tensors |= {f"squares.{k}": mx.concatenate(v) for k, v in squares}
            if tensors:
                mx.save_safetensors(str(_file(folder, number)), tensors)
        return moments_of_embeddings(way, paths, also)


def output_hessians(folder: Path, number: int) -> dict[str, mx.array]:
    """The information `look_ahead` found of a block: float32 [N, N] by path, unread."""
    return _found(folder, number, "answers.")


def squares(folder: Path, number: int) -> dict[str, mx.array]:
    """Squared lengths of the slopes of a block's outputs: float32 [T] by path, unread.

    Of the first tokens, and none where all tokens count.
    """
    return _found(folder, number, "squares.")


def drop_statistics(folder: Path, number: int) -> None:
    """Delete what was found of a block, once that is done."""
    _file(folder, number).unlink(missing_ok=True)


def _found(folder: Path, number: int, kind: str) -> dict[str, mx.array]:
    file = _file(folder, number)
    found = mx.load(str(file)) if file.is_file() else {}
    return {k.removeprefix(kind): v for k, v in found.items() if k.startswith(kind)}


def _file(folder: Path, number: int) -> Path:
    return folder / f"costs-{number:04d}.safetensors"


def _outputs(block: nn.Module, paths: list[str], *, with_wide: bool) -> dict[str, int]:
    """How many outputs layers of one matrix have; of those with too many none, or 0."""
    modules = dict(block.named_modules())
    shapes = {path: modules[path].weight.shape for path in paths}
    matrices = {path: shape for path, shape in shapes.items() if len(shape) == 2}
    counts = {
        path: outputs if outputs <= min(MOST_OUTPUTS, MOST_TIMES * inputs) else 0
        for path, (outputs, inputs) in matrices.items()
    }
    return counts if with_wide else {k: count for k, count in counts.items() if count}
