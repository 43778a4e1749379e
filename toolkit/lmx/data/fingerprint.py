"""Cache keys of tokenized data: the tokenizer, the libraries and lmx's own code."""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

from ..files.hashes import hash_file
from .tokenizer_files import eos_token_ids

LIBRARIES = ("tokenizers", "transformers", "jinja2", "mlx-lm")
# Files of a checkpoint folder that may define the tokenizer.
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*"),
    *("merges.txt", "chat_template*", "**/*.jinja", "*.model", "*.tiktoken", "*.py"),
)
# The modules of this folder that decide which tokens a source gives.
CODE = (
    *("builtin", "readers", "folders", "dataset", "hub_datasets", "record_formats"),
    *("splits", "token_store", "tokenization", "token_edges", "preference"),
    *("chat/rendering", "chat/sequences", "chat/turns", "chat/completeness"),
    *("chat/messages", "chat/system_messages"),
)


def tokenizer(folder: Path) -> list:
    """A value that changes with the tokenizer of a checkpoint folder."""
    files = {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)}
    hashes = [(str(f.relative_to(folder)), hash_file(f)) for f in sorted(files)]
    return [hashes, eos_token_ids(folder)]


def versions() -> list[str]:
    """The libraries that tokenize, each with its version."""
    return [f"{name} {version(name)}" for name in LIBRARIES]


@cache
def code() -> str:
    """Sha256 of the modules in `CODE`."""
    total = hashlib.sha256()
    for name in CODE:
        total.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return total.hexdigest()
