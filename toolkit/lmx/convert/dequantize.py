"""Expands a quantized checkpoint to dense weights, as `mlx_lm.convert --dequantize`."""

from pathlib import Path

import mlx.core as mx

from ..errors import UserError
from ..models import checkpoint_writer, quantized_layers
from ..models.loader import LoadedModel
from ..models.mtp_weights import copy_mtp
from .exporters.hf import dequantized_weights


def dequantize_checkpoint(
    loaded: LoadedModel, target: Path, dtype: mx.Dtype | None = None
) -> None:
    """Write a quantized model as an MLX checkpoint of dense weights.

    Args:
        loaded: the model, its weights unread, in the dtype they are stored in.
        target: an existing, empty folder.
        dtype: of all floating-point weights; None = as stored, that of the scales for
            the weights that were quantized.

    Raises:
        UserError: the model is not quantized.
    """
    if not any(map(quantized_layers.is_quantized, loaded.model.modules())):
        raise UserError("this model is not quantized", place=str(loaded.path))
    weights = dequantized_weights(loaded.model, dtype or loaded.dtype)
    if dtype:
        is_float = {n: mx.issubdtype(v.dtype, mx.floating) for n, v in weights.items()}
        weights = {n: v.astype(dtype) if is_float[n] else v for n, v in weights.items()}
    checkpoint_writer.write_checkpoint(
        target, weights, loaded.config, companions=loaded.path
    )
    copy_mtp(loaded.path, target, loaded.config)
