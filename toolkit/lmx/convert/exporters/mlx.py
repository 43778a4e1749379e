"""mlx-lm's checkpoint format, which mlx-lm, LM Studio and mlx-swift load."""

from pathlib import Path

from ...errors import FAILED, UserError
from ...files.atomic import copy_folder
from ...files.hashes import hash_folder
from ...files.json_files import read_json
from ...models.checkpoint import read_config
from ...models.checkpoint_writer import write_config
from .base import ExportContext, FormatCard

FOLDER = "model"
CARD = FormatCard(
    kind="A model in MLX's format",
    library="mlx",
    tags=("mlx",),
    language="bash",
    usage="""\
lmx generate . --prompt "..."
mlx_lm.generate --model . --prompt "..."
""",
    keeps_bits=True,
)


def export(folder: Path, context: ExportContext) -> None:
    """Copy the evaluated checkpoint into an empty folder, byte for byte.

    Only config.json is written anew if it has RoPE in the spelling of transformers 5
    alone, which mlx-lm would not read.

    Raises:
        UserError: the copy differs.
    """
    copy_folder(context.model, folder)
    if hash_folder(folder) != hash_folder(context.model):
        raise UserError(
            "the copy differs from the evaluated checkpoint; check the disk",
            place=str(folder),
            code=FAILED,
        )
    if (config := read_config(folder)) != read_json(folder / "config.json"):
        (folder / "config.json").unlink()
        write_config(folder, config)
