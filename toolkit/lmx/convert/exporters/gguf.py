"""A GGUF file for llama.cpp, of Llama and Qwen models: codes as they are, else float16.

Codes of 2 to 5 bits, and symmetric ones of 8, go over unchanged where float16 holds
their scales; every other matrix is written expanded.
"""

from pathlib import Path

from ...models.lora.base_layer import is_quantized
from .base import ExportContext

FOLDER = "gguf"


def require(config: dict) -> None:
    """Refuse a model that llama.cpp does not know, or would compute otherwise.

    Raises:
        UserError: naming what it is.
    """
    from ..gguf.config import metadata

    metadata(config)


def publish(folder: Path, published: ExportContext) -> None:
    """Write NAME.gguf and read it back.

    Raises:
        UserError: a model or tokenizer that has no such form, or another weight came
            back.
    """
    from ..gguf.writer import verify_roundtrip, write

    loaded = published.load(published.model)
    file = folder / f"{published.name}.gguf"
    kinds = write(file, loaded, name=published.name)
    verify_roundtrip(file, loaded)
    told = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    published.info(f"matrices of {file.name}: {told}")
    modules = [module for _, module in loaded.model.named_modules()]
    quantized = sum(map(is_quantized, modules))
    expanded = quantized - sum(kind.startswith("Q") for kind in kinds)
    if expanded:
        published.info(
            f"{expanded} of {quantized} quantized matrices are expanded there: ggml "
            "has no such codes, or float16 does not hold their scales"
        )
