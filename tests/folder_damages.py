"""What can happen to a folder of intermediate results between two runs."""

import os
import shutil
from pathlib import Path

from lmx.files.artifacts import INDEX


def cut(folder: Path) -> None:
    """Cut the end of the last file."""
    file = data_file(folder)
    file.write_bytes(file.read_bytes()[:-7])


def flip(folder: Path) -> None:
    """Flip one bit of a value."""
    file = data_file(folder)
    data = bytearray(file.read_bytes())
    data[-2] ^= 4
    file.write_bytes(data)


def lose_file(folder: Path) -> None:
    """Delete a file."""
    data_file(folder).unlink()


def lose_index(folder: Path) -> None:
    """Delete the hashes, as if an older lmx had written the folder."""
    (folder / INDEX).unlink()


def nest_index(folder: Path) -> None:
    """Write JSON in place of the hashes that no parser can read."""
    (folder / INDEX).write_text("[" * 100_000)


def become_file(folder: Path) -> None:
    """A file in place of the folder."""
    shutil.rmtree(folder)
    folder.write_text("a file")


def become_link(folder: Path) -> None:
    """A link to a folder with the same files."""
    other = folder.parent.parent / f"{folder.name}-aside"
    os.rename(folder, other)
    folder.symlink_to(other)


def hold_folder(folder: Path) -> None:
    """A folder in place of a file."""
    data_file(folder).unlink()
    data_file_name = folder / "tensors.safetensors"
    data_file_name.mkdir(exist_ok=True)


def data_file(folder: Path) -> Path:
    """The last file of a folder by name that is not its index."""
    files = (p for p in folder.iterdir() if p.is_file() and p.name != INDEX)
    return max(files)


DAMAGES = {
    function.__name__: function
    for function in (
        cut,
        flip,
        lose_file,
        lose_index,
        nest_index,
        become_file,
        become_link,
        hold_folder,
    )
}
