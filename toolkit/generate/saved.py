"""A session in a folder: what a model has read, to go on from another day."""

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import UserError
from ..run.files import atomic_folder, hash_file
from .chat import Messages
from .session import Session

ARRAYS, FACTS = "cache.safetensors", "session.json"


def save(
    session: Session,
    folder: Path,
    *,
    digest: str,
    tokens: Sequence[int],
    messages: Messages = (),
) -> None:
    """Write a session and the tokens it has read, whole or not at all.

    Args:
        digest: of the model; no other may go on from here.
        messages: of the chat that was read, to go on with it; see `messages`.
    """
    assert len(tokens) == session.length
    kinds, states = zip(*session.state, strict=True)
    arrays, plain = {}, {}
    for name, value in tree_flatten(list(states)):
        (arrays if isinstance(value, mx.array) else plain)[name] = value
    with atomic_folder(folder) as partial:
        mx.save_safetensors(str(partial / ARRAYS), arrays)
        facts = {
            "digest": digest,
            "sha256": hash_file(partial / ARRAYS),
            "kinds": kinds,
            "plain": plain,
            "tokens": [int(token) for token in tokens],
            "messages": list(messages),
        }
        (partial / FACTS).write_text(json.dumps(facts))


def load(session: Session, folder: Path, *, digest: str) -> list[int]:
    """Bring a session to where a saved one was; the tokens it has read.

    Raises:
        UserError: there is none, it is damaged or another model's.
    """
    place = str(folder)
    try:
        facts = json.loads((folder / FACTS).read_bytes())
        damaged = hash_file(folder / ARRAYS) != facts["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"this is no saved session: {error}", place=place) from None
    if damaged:
        raise UserError("this saved session is damaged", place=place)
    if facts["digest"] != digest:
        raise UserError("this saved session is another model's", place=place)
    arrays = mx.load(str(folder / ARRAYS))
    states = tree_unflatten([*arrays.items(), *facts["plain"].items()])
    state = list(zip(facts["kinds"], states, strict=True))
    session.restore(state, len(facts["tokens"]))
    return facts["tokens"]


def messages(folder: Path) -> Messages:
    """The chat of a session that `load` found to be whole; none if it was no chat."""
    return json.loads((folder / FACTS).read_bytes())["messages"]
