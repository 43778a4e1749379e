"""The name under which a model is published, from which users see what it is."""

import re
from pathlib import Path

from ...models.checkpoint import checkpoint_size, read_config

# Endings of names that say how the base model is stored.
STORED_AS = re.compile(
    r"(?i)([-_.](bf16|fp16|f16|fp32|f32|\d+(\.\d+)?-?(bit|bpw)|mxfp[48]|nvfp4|qat|mlx"
    r"|gguf|q\d\w*))+$"
)
MAX_WIDTHS = 2


def repository_name(
    base: str, folder: Path, *, is_trained: bool = False, is_qat: bool = False
) -> str:
    """The base model's name with what was done to it, e.g. Qwen3-0.6B-4bit-qat.

    Args:
        base: folder, Hub id or GGUF file of the base model.
        folder: the published checkpoint.
        is_trained: whether weights were trained on data.
        is_qat: whether they were trained with fake quantization.
    """
    # The Hub refuses names with other characters, or with - or . at an end.
    name = re.sub(r"[^\w.-]+", "-", Path(base).name)
    stem = STORED_AS.sub("", name).strip("-.") or "model"
    parts = [stem]
    if is_trained and not is_qat:
        parts.append("finetuned")
    if stored := stored_as(folder):
        parts.append(stored)
    if is_qat:
        parts.append("qat")
    return "-".join(parts)


def stored_as(folder: Path) -> str | None:
    """How a checkpoint is quantized, e.g. 4bit, mxfp4 or 3.5bpw; None = not at all.

    A checkpoint with more than two widths has its mean bits per weight.
    """
    quantization = read_config(folder).get("quantization")
    if not quantization:
        return None
    if (mode := quantization.get("mode", "affine")) != "affine":
        return mode
    layers = [value for value in quantization.values() if isinstance(value, dict)]
    widths = {quantization["bits"], *(layer["bits"] for layer in layers)}
    if len(widths) > MAX_WIDTHS:
        return f"{checkpoint_size(folder).bits_per_weight:.1f}bpw"
    return f"{quantization['bits']}bit"
