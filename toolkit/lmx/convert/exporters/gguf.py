"""GGUF for llama.cpp and Ollama: exact codes, else float16.

Codes of 2 to 5 bits, and symmetric codes of 8 bits, are copied if float16 holds their
scales, and those of mxfp4 and nvfp4. Every other matrix is written dequantized.
"""

from collections import Counter
from pathlib import Path

from ...config.draft import DraftConfig
from ...files.atomic import write_atomic
from .base import ExportContext, FormatCard

FOLDER = "gguf"
# Beside the model, which must be the only GGUF file in its folder.
DRAFT_FOLDER = "draft"
DENSE = ("F16", "BF16", "F32")
CARD = FormatCard(
    kind="A GGUF model",
    library=None,
    tags=("gguf",),
    language="bash",
    usage="""\
llama-cli -m {name}.gguf
ollama create {name} -f Modelfile && ollama run {name}
""",
    suffix="-GGUF",
)


def check_supported(config: dict) -> None:
    """Refuse a model that llama.cpp lacks or computes differently.

    Raises:
        UserError: names what is not supported.
    """
    from ..gguf.config import to_metadata

    to_metadata(config)


def check_draft(config: dict, draft: DraftConfig) -> None:
    """Refuse a drafter to be trained that llama.cpp lacks or computes differently.

    Args:
        config: of its target, which is supported.

    Raises:
        UserError: names what is not supported.
    """
    if draft.architecture != "model":
        from ..gguf.drafters import check_planned

        check_planned(config, draft)


def export(folder: Path, context: ExportContext) -> None:
    """Write NAME.gguf and verify it; write a Modelfile for Ollama.

    The model's drafter or draft model becomes draft/NAME-draft.gguf.

    Raises:
        UserError: GGUF cannot hold the model or tokenizer, or a weight differs after
            reading the file.
    """
    from ...models.drafters.io import is_drafter, read_drafter
    from ..gguf import drafters
    from ..gguf.modelfile import modelfile
    from ..gguf.writer import verify_roundtrip, write

    loaded = context.load(context.model)
    file = folder / f"{context.name}.gguf"
    types = write(file, loaded, name=context.name)
    verify_roundtrip(file, loaded)
    text = modelfile(file.name, loaded.tokenizer)
    write_atomic(folder / "Modelfile", text)
    names = [ggml_type for ggml_type, _ in types]
    counts = ", ".join(f"{names.count(name)} {name}" for name in sorted(set(names)))
    context.info(f"matrices of {file.name}: {counts}")
    # Codes that the file does not hold as they are in the model.
    quantized = [(name, bits) for name, bits in types if bits is not None]
    for (ggml_type, bits), count in sorted(Counter(quantized).items()):
        if ggml_type.startswith("Q") and not ggml_type.startswith(f"Q{bits}"):
            context.info(
                f"{count} matrices of {bits} bits are stored as {ggml_type}: ggml has "
                f"no codes of {bits} bits. Their weights are the same, but take "
                f"{ggml_type[1]} bits each"
            )
    if dequantized := sum(ggml_type in DENSE for ggml_type, _ in quantized):
        context.info(
            f"{dequantized} of {len(quantized)} quantized matrices are dequantized in "
            "it: ggml has no such codes, or float16 does not hold their scales"
        )
    if not context.draft:
        return
    (folder / DRAFT_FOLDER).mkdir()
    name = f"{context.name}-draft"
    use = f"{DRAFT_FOLDER}/{name}.gguf"
    file = folder / use
    if is_drafter(context.draft):
        drafter = read_drafter(context.draft)
        drafters.write(file, drafter, loaded, name=name)
        use += f" --spec-type draft-{drafter.architecture}"
        if drafter.drafts_in_one_pass:
            # Fewer slots than in training would be another input.
            use += f" --spec-draft-n-max {drafter.max_draft_tokens}"
    else:
        draft = context.load(context.draft)
        write(file, draft, name=name)
        verify_roundtrip(file, draft)
        use += " --spec-type draft-simple"
    context.info(f"with the draft: llama-server -m {context.name}.gguf -md {use}")
