"""What tokens depend on besides the rows: tokenizer, libraries and our own code."""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

from ..run.fs import hash_file
from .tokenizer_files import eos_token_ids

LIBRARIES = ("tokenizers", "transformers", "jinja2", "mlx-lm")
# The files of a checkpoint folder that a tokenizer may be made of.
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*"),
    *("merges.txt", "chat_template*", "**/*.jinja", "*.model", "*.tiktoken", "*.py"),
)
# The modules of this folder that make rows of sources and tokens of rows.
CODE = (
    *("builtin", "readers", "dataset", "record_formats"),
    *("splits", "token_store", "tokenization", "chat_template"),
)


def tokenizer(folder: Path) -> list:
    """What changes when the tokenizer of a checkpoint folder does."""
    found = {file for pattern in TOKENIZER for file in folder.glob(pattern)}
    hashes = [(str(f.relative_to(folder)), hash_file(f)) for f in sorted(found)]
    return [hashes, eos_token_ids(folder)]


def versions() -> list[str]:
    """The libraries that encode, each with its version."""
    return [f"{name} {version(name)}" for name in LIBRARIES]


@cache
def code() -> str:
    """Sha256 of our code that decides what a row's tokens are."""
    total = hashlib.sha256()
    for name in CODE:
        total.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return total.hexdigest()
