"""Groups of codes as other programs store them, on their way to MLX's affine groups."""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ...errors import UserError

SIZES = (128, 64, 32)
RUN = 32  # codes that fill whole words, whatever their width


@dataclass(frozen=True)
class Groups:
    """A quantized matrix [N, K]: weight = scale * code + bias, by row and group.

    Attributes:
        words: uint32 [N, K * bits / 32], the codes of a row as one stream of bits, the
            lowest first; that is how MLX stores them.
        scales, biases: [N, groups].
        owners: the group of every column, int [K].
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    owners: np.ndarray
    bits: int

    @property
    def size(self) -> int | None:
        """The largest group MLX knows in which no two columns differ in owner."""
        for size in SIZES:
            if len(self.owners) % size == 0:
                runs = self.owners.reshape(-1, size)
                if (runs == runs[:, :1]).all():
                    return size
        return None

    def tensors(self) -> dict[str, mx.array]:
        """What a checkpoint of MLX stores; scales that MLX has no size for repeat."""
        owners = mx.array(self.owners[:: self.size])
        scales, biases = self.scales[:, owners], self.biases[:, owners]
        return {"weight": self.words, "scales": scales, "biases": biases}

    def rows(self, order: np.ndarray) -> "Groups":
        """The same matrix with its rows in another order."""
        index = mx.array(order)
        parts = {n: getattr(self, n)[index] for n in ("words", "scales", "biases")}
        return replace(self, **parts)

    def columns(self, order: np.ndarray) -> "Groups":
        """The same matrix with its columns in another order."""
        codes = unpack(self.words, self.bits)[:, mx.array(order)]
        words = pack(codes, self.bits)
        return replace(self, words=words, owners=self.owners[order])


def from_zeros(scales: mx.array, zeros: mx.array) -> tuple[mx.array, mx.array]:
    """Scales and biases [N, groups] of weight = (code - zero) * scale.

    They keep the type of the scales if it holds -zero * scale to the last bit, as it
    does for a power of two; else both are float32, which has room for the product of
    16-bit scales and zeros of up to 8 bits.
    """
    return exact(scales, -zeros.astype(mx.float32) * scales.astype(mx.float32))


def exact(scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array]:
    """Scales, and float32 biases in the type of the scales if that changes none."""
    narrow = biases.astype(scales.dtype)
    if mx.array_equal(narrow.astype(mx.float32), biases):
        return scales, narrow
    return scales.astype(mx.float32), biases


def pack(codes: mx.array, bits: int) -> mx.array:
    """Codes [..., K] as uint32 [..., K * bits / 32], the lowest bits first."""
    if 8 % bits == 0:
        shares = codes.astype(mx.uint8).reshape(*codes.shape[:-1], -1, 8 // bits)
        whole = shares[..., 0]
        for index in range(1, 8 // bits):
            whole = whole | (shares[..., index] << (bits * index))
        return mx.contiguous(whole).view(mx.uint32)
    runs = codes.astype(mx.uint32).reshape(*codes.shape[:-1], -1, RUN)
    words = [mx.zeros(runs.shape[:-1], mx.uint32) for _ in range(bits)]
    for index in range(RUN):
        word, shift = divmod(index * bits, 32)
        words[word] = words[word] | (runs[..., index] << shift)
        if shift + bits > 32:
            words[word + 1] = words[word + 1] | (runs[..., index] >> (32 - shift))
    return mx.stack(words, axis=-1).reshape(*codes.shape[:-1], -1)


def unpack(words: mx.array, bits: int) -> mx.array:
    """The codes [..., K] of 32-bit words [..., K * bits / 32], uint32."""
    if 8 % bits == 0:
        shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
        codes = (words.view(mx.uint32)[..., None] >> shifts) & (2**bits - 1)
        return codes.reshape(*words.shape[:-1], -1)
    runs = words.view(mx.uint32).reshape(*words.shape[:-1], -1, bits)
    codes = []
    for index in range(RUN):
        word, shift = divmod(index * bits, 32)
        code = runs[..., word] >> shift
        if shift + bits > 32:
            code = code | (runs[..., word + 1] << (32 - shift))
        codes.append(code & (2**bits - 1))
    return mx.stack(codes, axis=-1).reshape(*words.shape[:-1], -1)


def part(parts: dict[str, mx.array], layer: str, leaf: str) -> mx.array:
    """A tensor of a layer.

    Raises:
        UserError: the layer has none of this name.
    """
    if leaf not in parts:
        raise UserError(
            f"the tensor is missing, though {layer} has others of a quantized layer",
            place=f"{layer}.{leaf}",
            hint="the checkpoint is not whole, or it is not of the format it says",
        )
    return parts[leaf]


def require_shape(value: mx.array, shape: tuple[int, ...], name: str) -> None:
    """Refuse a tensor that does not belong to the others of its layer.

    Raises:
        UserError: naming it, its shape and the one that is wanted.
    """
    if value.shape != shape:
        raise UserError(
            f"the shape is {list(value.shape)}, but the rest of the layer and the "
            f"config want {list(shape)}",
            place=name,
            hint="the checkpoint is damaged, or its config is of another one",
        )
