"""Grids of GGUF's block types: Q4_0, Q5_0, Q8_0, Q3_K, Q4_K, Q5_K and Q6_K.

A block starts with one or two float16 steps. In small blocks a weight is
step * (code - middle). A K block has 256 weights in groups; a group has an integer
scale, and in Q4_K and Q5_K an integer minimum of 6 bits:

    step * scale * (code - middle)    or    step * scale * code - min_step * minimum

Float32 holds all these products exactly, so MLX, llama.cpp and the `gguf` package
compute the same weights from a block. The layout of the bytes is in `convert/gguf`.
"""

from dataclasses import dataclass, replace

import mlx.core as mx

from ..config.quant_spec import GGUF_MODES, K_BLOCK, QuantSpec
from ..models import gguf_scales
from .affine_grid import AffineGrid, Grid, safe_scale
from .backend import FLOAT16_MAX, library, round_to_dtype


@dataclass(frozen=True)
class BlockFormat:
    """A block type.

    Attributes:
        bits: of a code.
        group: weights that share a scale.
        groups: of a block.
        scales: the least and the greatest integer scale of a group.
        has_minimum: whether a group has a minimum. Else codes are relative to
            `middle`.
    """

    bits: int
    group: int
    groups: int
    scales: tuple[int, int]
    has_minimum: bool = False

    @property
    def levels(self) -> float:
        """Number of codes."""
        return 2.0**self.bits

    @property
    def middle(self) -> float:
        """The code of weight zero; 0 in formats with minima."""
        return 0.0 if self.has_minimum else self.levels / 2

    @property
    def is_small(self) -> bool:
        """Whether a block is one group."""
        return self.groups == 1


K_SCALES = {"q3_k": (-32, 31), "q4_k": (0, 63), "q5_k": (0, 63), "q6_k": (-128, 127)}
FORMATS = {
    mode: BlockFormat(
        bits,
        group,
        groups=K_BLOCK // group if mode in K_SCALES else 1,
        scales=K_SCALES.get(mode, (1, 1)),
        has_minimum=mode in ("q4_k", "q5_k"),
    )
    for mode, (group, bits) in GGUF_MODES.items()
}


@dataclass(frozen=True)
class GGUFGrid(Grid):
    """Blocks of a matrix [N, K], all float32.

    Attributes:
        codes: [N, K], from 0.
        steps, min_steps: [N, B], a value of each block that float16 holds.
        scales, minima: [N, G], an integer of each group; minima may be 0.
        middle: the code of weight zero.
    """

    codes: mx.array
    steps: mx.array
    min_steps: mx.array
    scales: mx.array
    minima: mx.array
    middle: float

    @property
    def affine(self) -> AffineGrid:
        """The same grid with a float32 scale and bias per group."""
        steps, min_steps = self.steps_by_group
        scales = steps * self.scales
        biases = -min_steps * self.minima
        return AffineGrid(self.codes, scales, biases - self.middle * scales)

    @property
    def steps_by_group(self) -> tuple[mx.array, mx.array]:
        """Steps [N, G] of the block of each group."""
        groups = self.scales.shape[1] // self.steps.shape[1]
        return tuple(mx.repeat(v, groups, axis=1) for v in (self.steps, self.min_steps))

    def weight(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The dequantized weight [N, K], float32; no other dtype holds it."""
        assert dtype == mx.float32, dtype
        return self.affine.weight()

    def tensors(self, spec: QuantSpec) -> dict[str, mx.array]:
        """The stored tensors: affine groups, or the dense weight and the factors of its
        groups; see `QuantSpec.stored`."""
        if spec.stored is None:
            return {
                "weight": self.weight(),
                gguf_scales.STEPS: self.steps.astype(mx.float16),
                gguf_scales.SCALES: self.scales.astype(mx.int8),
            }
        return self.affine.tensors(spec)


def pack(weight: mx.array, spec: QuantSpec) -> dict[str, mx.array]:
    """Quantize a weight [..., K] with RTN; the stored tensors."""
    rows = weight.reshape(-1, weight.shape[-1]).astype(mx.float32)
    tensors = round_to_nearest(rows, FORMATS[spec.mode]).tensors(spec)
    shape = weight.shape[:-1]
    return {name: value.reshape(*shape, -1) for name, value in tensors.items()}


def round_to_nearest(weight: mx.array, form: BlockFormat) -> GGUFGrid:
    """Blocks that span the range of a weight, float32 [N, K], with nearest codes."""
    groups = weight.reshape(len(weight), -1, form.group)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    if form.has_minimum:
        low = mx.minimum(low, 0)
        scales, biases = (high - low) / (form.levels - 1), low
    else:
        # The largest magnitude gets code 0, which reaches farther than the last code.
        largest = mx.where(mx.abs(low) > mx.abs(high), low, high)
        scales, biases = -largest / form.middle, mx.zeros_like(low)
    return with_nearest_codes(weight, block_scales(scales, biases, form), form)


def block_scales(scales: mx.array, biases: mx.array, form: BlockFormat) -> GGUFGrid:
    """Steps, integer scales and minima near float32 scales and biases [N, G].

    The codes of the result are empty. Biases of formats without minima do not count.
    """
    count = len(scales)
    if form.is_small:
        steps = to_float16(scales)
        ones, zeros = mx.ones_like(scales), mx.zeros_like(scales)
        return GGUFGrid(mx.zeros((count, 0)), steps, zeros, ones, zeros, form.middle)
    limit = form.scales[1]

    def integers(values: mx.array) -> tuple[mx.array, mx.array]:
        blocks = values.reshape(count, -1, form.groups)
        steps = to_float16(mx.abs(blocks).max(axis=-1) / limit)
        return steps, nearest_integers(blocks, steps[..., None], form).reshape(
            values.shape
        )

    steps, scales = integers(scales)
    min_steps, minima = integers(-mx.minimum(biases, 0))
    if not form.has_minimum:
        min_steps, minima = mx.zeros_like(min_steps), mx.zeros_like(minima)
    no_codes = mx.zeros((count, 0))
    return GGUFGrid(no_codes, steps, min_steps, scales, minima, form.middle)


def nearest_integers(values, steps, form: BlockFormat):
    """The nearest integer scales or minima of values, MLX or NumPy."""
    backend = library(values)
    rounded = (mx.round if backend is mx else backend.rint)(
        values / backend.where(steps == 0, 1.0, steps)
    )
    low, high = form.scales
    return backend.minimum(backend.maximum(rounded, low), high)


def to_float16(values):
    """The nearest finite values of float16, as float32; MLX or NumPy."""
    backend = library(values)
    values = backend.minimum(backend.maximum(values, -FLOAT16_MAX), FLOAT16_MAX)
    return round_to_dtype(values, mx.float16)


def with_nearest_codes(weight: mx.array, grid: GGUFGrid, form: BlockFormat) -> GGUFGrid:
    """The grid with the nearest codes of a weight, float32 [N, K]."""
    affine = grid.affine
    groups = weight.reshape(*affine.scales.shape, form.group)
    divisor, top = safe_scale(affine.scales[..., None], form.levels)
    codes = mx.round((groups - affine.biases[..., None]) / divisor)
    # A group whose scale is 0 has one level. `middle` gives it no negative zeros.
    codes = mx.where(top == 0, grid.middle, mx.clip(codes, 0, top))
    return replace(grid, codes=codes.reshape(weight.shape))
