"""Hashes of files, folders and JSON values."""

import hashlib
import json
from pathlib import Path


def hash_file(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_folder(path: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by relative name."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(file.relative_to(path)): hash_file(file) for file in files}


def key_of(facts: object) -> str:
    """A key of a JSON value: 32 hexadecimal digits of its sha256."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
