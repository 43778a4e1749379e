"""GGUF for llama.cpp, of Llama and Qwen models: exact codes, else float16.

Codes of 2 to 5 bits, and symmetric codes of 8 bits, are copied if float16 holds their
scales. Every other matrix is written dequantized.
"""

from pathlib import Path

from ...models.quantized_layers import is_quantized
from .base import ExportContext

FOLDER = "gguf"


def check_supported(config: dict) -> None:
    """Refuse a model that llama.cpp lacks or computes differently.

    Raises:
        UserError: names what is not supported.
    """
    from ..gguf.config import to_metadata

    to_metadata(config)


def export(folder: Path, context: ExportContext) -> None:
    """Write NAME.gguf and verify it.

    Raises:
        UserError: GGUF cannot hold the model or tokenizer, or a weight differs after
            reading the file.
    """
    from ..gguf.writer import verify_roundtrip, write

    loaded = context.load(context.model)
    file = folder / f"{context.name}.gguf"
    types = write(file, loaded, name=context.name)
    verify_roundtrip(file, loaded)
    counts = ", ".join(f"{types.count(name)} {name}" for name in sorted(set(types)))
    context.info(f"matrices of {file.name}: {counts}")
    quantized = sum(is_quantized(module) for module in loaded.model.modules())
    dequantized = quantized - sum(name.startswith("Q") for name in types)
    if dequantized:
        context.info(
            f"{dequantized} of {quantized} quantized matrices are dequantized in it: "
            "ggml has no such codes, or float16 does not hold their scales"
        )
