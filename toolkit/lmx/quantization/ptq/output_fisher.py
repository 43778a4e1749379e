"""Fisher information of layer outputs, estimated before anything is quantized.

For embeddings it is returned as statistics of their inputs. For layers in blocks, the
Fisher information of their outputs and the gradient norms of the tokens stay on disk
until their block is quantized.
"""

from itertools import accumulate
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx

from ...interfaces import SINGLE_PROCESS, Communicator, Logger
from ...models.blockwise import BlockwiseModel
from ...models.hooks import differentiable
from .embeddings import embedding_statistics, embeddings, tied_heads
from .fisher import ForwardBackwardPass, visible_positions
from .input_statistics import InputStatistics

# Tokens for each column of an embedding and for each output.
TOKENS_PER_COLUMN = 1
TOKENS_PER_OUTPUT = 8
# Limit of these tokens, whose hidden states before every block are on disk, if tokens
# have different weights: the first tokens get their own.
MAX_WEIGHTED_TOKENS = 1 << 16
# Layers with more outputs, or a larger ratio of outputs to inputs, are solved row by
# row: their matrices are large, and layers that widen a block gain least.
MAX_OUTPUTS, MAX_OUTPUT_RATIO = 4096, 2
# The gradients are those of one sampled label. So this share of a token's weight is its
# own; the rest is the mean of all tokens that count, or of all that do not.
OWN_WEIGHT = 0.5


def estimate_output_fisher(
    blockwise: BlockwiseModel,
    embedding_paths: list[str],
    block_paths: list[list[str]],
    tokens: list[mx.array],
    counted: list[mx.array],
    *,
    compute: mx.Dtype,
    folder: Path,
    max_tokens: int,
    logger: Logger,
    ranks: Communicator = SINGLE_PROCESS,
) -> dict[str, InputStatistics]:
    """Run tokens forward and their gradients back; statistics of embeddings by path.

    Args:
        block_paths: paths in each block of the layers to estimate; see `output_fisher`.
        tokens, counted: int32 and bool [B, L] by shard; whether a prediction counts.
        compute: dtype to run blocks in.
        folder: for the results, which rank 0 writes, and temporarily for hidden states.
        max_tokens: limit of the tokens, if all count alike.
        logger: shows the progress.
        ranks: the processes that share the tokens.

    Raises:
        UserError: the disk has no space.
    """
    all_count = all(part.all().item() for part in counted)
    # By block and path; 0 for layers with too many, of which only the norms are used.
    outputs: list[dict[str, int]] = []
    for block, paths in zip(blockwise.blocks, block_paths, strict=True):
        modules, counts = dict(block.named_modules()), {}
        for path in paths:
            if modules[path].weight.ndim != 2:
                continue
            size, width = modules[path].weight.shape
            is_wide = size > min(MAX_OUTPUTS, MAX_OUTPUT_RATIO * width)
            if not (is_wide and all_count):
                counts[path] = 0 if is_wide else size
        outputs.append(counts)
    sizes = [size for by_path in outputs for size in by_path.values() if size]
    tables = embeddings(blockwise.model, embedding_paths)
    widths = [weight.shape[-1] for weight in tables.values()]
    if not (any(outputs) or widths):
        return {}
    limit = num_fisher_tokens(widths, sizes, max_tokens)
    limit = limit if all_count else MAX_WEIGHTED_TOKENS
    tokens, counted = _first(tokens, limit), _first(counted, limit)
    work = 3 * len(list(ranks.shard(tokens))) * len(blockwise)
    with (
        TemporaryDirectory(dir=folder) as states,
        logger.progress(work, "Fisher information", percent=True) as progress,
        differentiable(blockwise.model),
        blockwise.cast_outer_weights(compute),
    ):
        args = blockwise, tokens, counted, compute, Path(states), progress, ranks
        fb_pass = ForwardBackwardPass(*args)
        heads = tied_heads(fb_pass, embedding_paths) if embedding_paths else []
        fb_pass.forward(reserved_bytes=sum(4 * size**2 for size in sizes))
        fb_pass.start_backward()
        layers = [{path: size > 0 for path, size in o.items()} for o in outputs]
        for index, gradients in fb_pass.backward(layers):
            fisher = gradients.fisher_of_all()
            tensors = {f"fisher.{path}": value for path, value in fisher.items()}
            if not all_count:
                norms = gradients.norms_of_all()
                tensors |= {f"norms.{path}": value for path, value in norms.items()}
            if tensors and ranks.is_first:
                mx.save_safetensors(str(_file(folder, index)), tensors)
            ranks.wait_for_all()
        return embedding_statistics(fb_pass, embedding_paths, heads)


def _first(shards: list[mx.array], limit: int) -> list[mx.array]:
    """The first windows [B, L] of shards, with at least `limit` positions in all."""
    chosen = []
    for shard in shards:
        if limit <= 0:
            break
        part = shard[: ceil(limit / shard.shape[1])]
        chosen.append(part)
        limit -= part.size
    return chosen


def num_fisher_tokens(widths: list[int], outputs: list[int], limit: int) -> int:
    """Tokens for embeddings of these widths and layers of these numbers of outputs."""
    num_tokens = [TOKENS_PER_COLUMN * width for width in widths]
    num_tokens += [TOKENS_PER_OUTPUT * size for size in outputs]
    return min(max(num_tokens, default=0), limit)


def output_fisher(folder: Path, index: int) -> dict[str, mx.array]:
    """Fisher information of a block's outputs by path, float32 [N, N], lazy."""
    return _load(folder, index, "fisher.")


def gradient_norms(folder: Path, index: int) -> dict[str, mx.array]:
    """Squared gradient norms of a block's outputs by path, float32 [T], lazy.

    They cover the first tokens. There are none if all tokens count.
    """
    return _load(folder, index, "norms.")


def _load(folder: Path, index: int, prefix: str) -> dict[str, mx.array]:
    file = _file(folder, index)
    tensors = mx.load(str(file)) if file.is_file() else {}
    return {
        k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)
    }


def _file(folder: Path, index: int) -> Path:
    return folder / f"fisher-{index:04d}.safetensors"


def token_weights(
    squared_norms: mx.array | None, counted: list[mx.array]
) -> list[mx.array] | None:
    """Weights of calibration tokens, with a mean of 1 over the visible ones.

    A weight error E changes the loss of a token by g'Ex, with g the gradient with
    respect to the layer's output. So its input x is weighted by the squared norm of g
    (GuidedQuant, arXiv 2505.07004, for all outputs together).

    Args:
        squared_norms: float32 [T], squared gradient norms of the first tokens. None =
            all visible tokens have the same weight.
        counted: bool [B, L] by shard.

    Returns:
        float32 [B * L] by shard. None = all tokens have the same weight.
    """
    if all(part.all().item() for part in counted):
        return None
    counts = mx.concatenate([part.reshape(-1) for part in counted])
    visible = mx.concatenate([visible_positions(part).reshape(-1) for part in counted])
    weights = visible.astype(mx.float32)
    if squared_norms is not None:
        means = mx.zeros(counts.shape)
        for kind in (counts, visible & ~counts):
            known = kind[: len(squared_norms)]
            total = mx.where(known, squared_norms, 0.0).sum()
            means = mx.where(kind, total / mx.maximum(known.sum(), 1), means)
        weights = means.at[: len(squared_norms)].multiply(1 - OWN_WEIGHT)
        weights = weights.at[: len(squared_norms)].add(OWN_WEIGHT * squared_norms)
        weights = weights * (visible.sum() / weights.sum())
    shards = mx.split(weights, [*accumulate(part.size for part in counted)][:-1])
    mx.eval(shards)
    return shards
