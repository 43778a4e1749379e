"""A prefix cache on disk, with the chat that it belongs to."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import mlx.core as mx
import numpy as np
from annotated_types import Len
from mlx.utils import tree_flatten, tree_unflatten
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from ...errors import UserError, error_detail, library_errors
from ...files.atomic import atomic_folder
from ...files.hashes import hash_file
from ...files.json_files import read_json
from ...models.safetensors_io import read_header
from ..prompt import Messages
from .prefix import PrefixCache, PrefixNode
from .sequence import CacheState

ARRAYS_FILE, METADATA_FILE = "cache.safetensors", "metadata.json"


def require_replaceable(folder: Path) -> None:
    """Refuse a place for a prompt cache that has anything else.

    Raises:
        UserError: naming it.
    """
    if os.path.isdir(folder):
        others = {path.name for path in folder.iterdir()} - {ARRAYS_FILE, METADATA_FILE}
    else:
        others = {folder.name} if os.path.lexists(folder) else set()
    if others:
        raise UserError(
            f"{min(others)} is there, which is no prompt cache",
            place=str(folder),
            hint="name a new folder",
        )


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SavedNode(_Strict):
    """A `PrefixNode` without its arrays.

    Attributes:
        parent: number of its parent from 1; 0 = the root.
    """

    parent: NonNegativeInt
    tokens: Annotated[list[NonNegativeInt], Len(1)]
    layer_ids: list[NonNegativeInt]


class SavedPrompts(_Strict):
    """What a prompt cache says of itself, besides its arrays.

    Attributes:
        digest: hash of the model; only this model can load the cache.
        kinds: see `CacheState.kinds`.
        nodes: of the tree, parents first.
        scalars: values of the nodes that are no arrays.
        messages: the chat that was processed; may be empty.
    """

    digest: str
    arrays_sha256: str
    kinds: list[str]
    nodes: list[SavedNode]
    scalars: dict[str, int | None]
    messages: list[Annotated[dict[Literal["role", "content"], str], Len(2)]]

    @property
    def sha256(self) -> str:
        """Hash of all of it, and so of the arrays too."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def save_prompt_cache(
    prefixes: PrefixCache,
    folder: Path,
    *,
    kinds: list[str],
    digest: str,
    messages: Messages = (),
) -> None:
    """Write a prefix cache to a folder, atomically.

    Args:
        kinds, digest, messages: see `SavedPrompts`.

    Raises:
        UserError: the folder has other files.
    """
    require_replaceable(folder)
    nodes = [*prefixes.nodes()]
    numbers = {prefixes.root: 0} | {n: i for i, n in enumerate(nodes, start=1)}
    arrays, scalars = {}, {}
    for name, value in tree_flatten([node.state for node in nodes]):
        (arrays if isinstance(value, mx.array) else scalars)[name] = value
    with atomic_folder(folder) as partial:
        mx.save_safetensors(str(partial / ARRAYS_FILE), arrays)
        saved = SavedPrompts(
            digest=digest,
            arrays_sha256=hash_file(partial / ARRAYS_FILE),
            kinds=kinds,
            nodes=[
                SavedNode(
                    parent=numbers[node.parent],
                    tokens=node.tokens.tolist(),
                    layer_ids=[*node.layer_ids],
                )
                for node in nodes
            ],
            scalars=scalars,
            messages=[*messages],
        )
        content = {"sha256": saved.sha256, "prompts": saved.model_dump()}
        (partial / METADATA_FILE).write_text(json.dumps(content))


def load_prompt_cache(
    prefixes: PrefixCache,
    folder: Path,
    *,
    new_cache: Callable[[], CacheState],
    digest: str,
) -> SavedPrompts:
    """Fill an empty prefix cache from a folder.

    Raises:
        UserError: the folder holds no prompt cache, a damaged one, or one of another
            model or other KV bits.
    """
    place = str(folder)
    try:
        content = read_json(folder / METADATA_FILE)
        saved = SavedPrompts.model_validate(content.get("prompts"))
        read_header(folder / ARRAYS_FILE)
        hashes = saved.sha256, hash_file(folder / ARRAYS_FILE)
    except (OSError, ValueError) as error:
        detail = error_detail(error)
        raise UserError(f"not a saved prompt cache: {detail}", place=place) from None
    damaged = "the saved prompt cache is damaged"
    if hashes != (content.get("sha256"), saved.arrays_sha256):
        raise UserError(damaged, place=place)
    if saved.digest != digest:
        raise UserError("the saved prompt cache belongs to another model", place=place)
    _require_kinds(saved.kinds, new_cache().kinds, place)
    with library_errors(damaged, place=place):
        _restore(prefixes, saved, mx.load(str(folder / ARRAYS_FILE)))
        for node in prefixes.nodes():
            if not node.children:
                _check(node, prefixes, new_cache)
    return saved


def _require_kinds(saved: list[str], kinds: list[str], place: str) -> None:
    """Refuse layers of other kinds than those of the model; see `CacheState.kinds`."""
    if saved == kinds:
        return
    theirs, ours = (
        " and ".join(sorted({kind.partition(",")[0] for kind in each}))
        for each in (saved, kinds)
    )
    if theirs == ours:
        raise UserError(
            "the keys of the saved prompt cache are rotated in another way",
            place=place,
            hint="process the prompts again: another machine saved it",
        )
    raise UserError(
        f"the layers of the saved prompt cache are {theirs}, and those of the model "
        f"are {ours}",
        place=place,
        hint="use the KV bits and the max_kv_size that it was saved with",
    )


def _restore(
    prefixes: PrefixCache, saved: SavedPrompts, arrays: dict[str, mx.array]
) -> None:
    """Add the saved nodes to the tree."""
    states = tree_unflatten([*arrays.items(), *saved.scalars.items()])
    nodes = [prefixes.root]
    for node, state in zip(saved.nodes, states, strict=True):
        tokens = np.array(node.tokens, np.int32)
        new = PrefixNode(tokens, [], layer_ids=tuple(node.layer_ids))
        new.state = state
        hidden = [] if new.hidden is None else [new.hidden.shape[1]]
        lengths = [part.shape[2] for part in new.positions] + hidden
        if any(length != len(tokens) for length in lengths):
            raise ValueError("the arrays have other lengths than their tokens")
        prefixes.add(nodes[node.parent], new)
        nodes.append(new)


def _check(
    end: PrefixNode, prefixes: PrefixCache, new_cache: Callable[[], CacheState]
) -> None:
    """Raise an error if the model does not run with this prefix."""
    tokens, node = [0], end
    while node.parent:
        tokens, node = [*node.tokens.tolist(), *tokens], node.parent
    cache, _ = prefixes.fetch(tokens, new_cache)
    # Only the shapes are checked; nothing is computed.
    cache.model(mx.zeros((1, 1), mx.int32), cache=cache.caches)
