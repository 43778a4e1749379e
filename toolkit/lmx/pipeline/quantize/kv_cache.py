"""Bits of the KV cache by layer, for a finished quantized model."""

import json
from pathlib import Path

from ...config.quantize import KVCacheConfig
from ...cpu import keep_dequantized
from ...files.atomic import write_atomic
from ...files.json_files import read_json
from ...models.loader import KV_BITS
from ...quantization.mixed_precision import kv_bits
from ..context import StageContext
from .calibration import CalibrationData


def quantize_kv_cache(
    config: KVCacheConfig,
    model: Path,
    calibration: CalibrationData,
    context: StageContext,
) -> dict:
    """Choose the bits of the KV cache by layer, and write them to config.json.

    Args:
        model: the folder of the finished quantized model.

    Returns:
        Facts for the report; see `choose_kv_bits`.

    Raises:
        UserError: the cache of this model cannot be quantized, or no choice fits.
    """
    ranks = context.ranks
    served = context.load(model)
    keep_dequantized(served.model)
    sequences = calibration.train_sequences(kv_bits.CALIBRATION_TOKENS)
    held_out = calibration.eval_sequences
    bits, facts = kv_bits.choose_kv_bits(
        served.model,
        served.dtype,
        config,
        sequences,
        held_out,
        context.logger,
        ranks,
    )
    if ranks.is_first:
        file = model / "config.json"
        values = read_json(file) | {KV_BITS: bits}
        text = json.dumps(values, indent=4, sort_keys=True)
        write_atomic(file, text + "\n")
    return facts
