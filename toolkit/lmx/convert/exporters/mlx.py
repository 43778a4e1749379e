"""mlx-lm's checkpoint format, as stock mlx-lm, LM Studio and mlx-swift load it."""

import shutil
from pathlib import Path

from ...errors import FAILED, UserError
from ...run.fs import hash_folder
from .base import ExportContext

FOLDER = "model"


def publish(folder: Path, published: ExportContext) -> None:
    """Copy the checkpoint into an empty folder, byte for byte as it was measured.

    Raises:
        UserError: the copy differs.
    """
    shutil.copytree(published.model, folder, dirs_exist_ok=True)
    if hash_folder(folder) != hash_folder(published.model):
        raise UserError(
            "the copy differs from what was measured; is the disk sound?",
            place=str(folder),
            code=FAILED,
        )
