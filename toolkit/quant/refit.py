"""All scales and biases of given codes at once, by least squares."""

import mlx.core as mx

from .grid import Grid

# Numbers of the largest array.
AT_ONCE = 1 << 24
RIDGE = 1e-4


def refit(grid: Grid, target: mx.array, matrix: mx.array, dtype: mx.Dtype) -> Grid:
    """The scales and biases that lose least with these codes, all at once."""
    groups = grid.scales.shape[1]
    blocks = matrix.reshape(groups, grid.group, groups, grid.group)
    rows = max(1, AT_ONCE // (groups * len(matrix)))
    found = []
    for start in range(0, len(target), rows):
        here = slice(start, start + rows)
        part = Grid(grid.codes[here], grid.scales[here], grid.biases[here])
        found.append(_refitted(part, target[here], blocks, dtype))
        mx.eval(found[-1])
    scales, biases = (mx.concatenate(v) for v in zip(*found, strict=True))
    return Grid(grid.codes, scales, biases)


def _refitted(grid: Grid, target: mx.array, blocks: mx.array, dtype: mx.Dtype):
    groups, group = blocks.shape[:2]
    width = groups * group
    codes = grid.codes.reshape(-1, groups, group)
    # About their mean, or scales and biases would mean nearly the same.
    middle = codes.mean(axis=-1)
    codes = codes - middle[..., None]
    moments = codes.swapaxes(0, 1) @ blocks.reshape(groups, group, width)
    moments = moments.reshape(groups, -1, groups, group)
    by_scales = (moments * codes).sum(axis=-1).transpose(1, 2, 0)
    mixed = moments.sum(axis=-1).transpose(1, 0, 2)
    by_biases = mx.broadcast_to(blocks.sum(axis=(1, 3)), by_scales.shape)
    system = mx.concatenate(
        [
            mx.concatenate([by_scales, mixed], axis=2),
            mx.concatenate([mixed.swapaxes(1, 2), by_biases], axis=2),
        ],
        axis=1,
    )
    pull = (target - grid.weight()) @ blocks.reshape(width, width)
    pull = pull.reshape(-1, groups, group)
    wanted = mx.concatenate([(pull * codes).sum(axis=-1), pull.sum(axis=-1)], axis=1)
    diagonal = mx.diagonal(system, axis1=1, axis2=2)
    ridge = RIDGE * diagonal + 1e-6 * diagonal.mean(axis=1, keepdims=True)
    system = system + ridge[..., None] * mx.eye(2 * groups)
    with mx.stream(mx.cpu):
        step = mx.linalg.solve(system, wanted[..., None])[..., 0]
    center = grid.biases + middle * grid.scales + step[:, groups:]
    scales = (grid.scales + step[:, :groups]).astype(dtype).astype(mx.float32)
    # The bias makes up for the rounding of the scale.
    biases = (center - middle * scales).astype(dtype).astype(mx.float32)
    return scales, biases
