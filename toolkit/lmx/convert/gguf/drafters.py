"""Drafters on hidden states as GGUF files: llama.cpp's `eagle3` and `dflash`.

A file holds the drafter and the target's tokenizer. llama.cpp takes the token
embedding, and the LM head of a DFlash drafter, from the file of the target.

llama.cpp numbers the states between the blocks: the state i is the input of block i, so
the output of block i - 1. lmx names the blocks whose outputs a drafter reads.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ...config.draft import DraftConfig
from ...errors import FAILED, UserError
from ...models.drafters.base import Drafter
from ...models.drafters.configs import AttentionConfig, Eagle3Config
from ...models.drafters.io import ARCHITECTURES
from ...models.hooks import require_hidden_states
from ...models.loader import LoadedModel, model_arguments
from ..importers import gguf as gguf_importer
from . import blocks, config, reader, tokenizer
from .architecture import YARN, Architecture
from .tensor_names import stored_name
from .writer import (
    StoredTensor,
    differing_tokenizer,
    embedding_rows,
    equals,
    require_equal,
    row_order,
    write_file,
)

# llama.cpp's targets that keep the inputs of their blocks for a drafter.
TARGETS = ("llama", "qwen3", "qwen3moe", "gpt-oss", "hunyuan-dense")
SCALINGS = (*YARN, "llama3")
EAGLE3 = Architecture(
    "eagle3",
    "Eagle3Speculator",
    rope="permuted",
    rope_scalings=SCALINGS,
    own_names={
        "fc": "fc",
        "input_norm": "enc.output_norm",
        "model.layers.0.hidden_norm": "blk.0.attn_norm_2",
    },
)
DFLASH = Architecture(
    "dflash",
    "DFlashDraftModel",
    rope_scalings=SCALINGS,
    own_names={"fc": "fc", "hidden_norm": "enc.output_norm"},
)
# Hidden states of an EAGLE-3 drafter in llama.cpp.
EAGLE3_STATES = 3
DRAFT_TOKENS = "d2t"


def to_metadata(
    drafter: AttentionConfig, layer_ids: Sequence[int], target: dict
) -> dict[str, Any]:
    """The metadata from which llama.cpp builds a drafter.

    Args:
        layer_ids: the target's blocks, from 0, whose outputs it reads.
        target: the config of the target.

    Raises:
        UserError: llama.cpp lacks the drafter or gives its target no hidden states, or
            computes it differently.
    """
    architecture = _architecture(drafter)
    name = config.model_architecture(target).name
    if name not in TARGETS:
        raise UserError(
            f"llama.cpp gives drafters no hidden states of {name} models",
            hint=f"its targets of drafters: {', '.join(TARGETS)}",
            code=FAILED,
        )
    last = model_arguments(config.text_config(target)).num_hidden_layers - 1
    if last in layer_ids:
        raise _unsupported(f"that read the output of the target's last block ({last})")
    values: dict[str, Any] = {"target_layers": [index + 1 for index in layer_ids]}
    if isinstance(drafter, Eagle3Config):
        if (count := len(layer_ids)) != EAGLE3_STATES:
            raise _unsupported(
                f"that read {count} blocks, not {EAGLE3_STATES} as in llama.cpp,"
            )
        if drafter.num_hidden_layers != 1:
            raise _unsupported(f"of {drafter.num_hidden_layers} layers")
        if drafter.attention_bias:
            raise _unsupported("with attention_bias")
        if drafter.rotary_dim != drafter.head_dim:
            raise _unsupported("with partial_rotary_factor")
        values |= {
            "target_hidden_size": drafter.hidden_size,
            "norm_before_residual": drafter.norm_before_residual,
            "norm_before_fc": drafter.norm_before_fc,
        }
    else:
        values |= {"block_size": drafter.block_size}
    metadata = config.to_metadata(_layer_config(drafter), architecture)
    metadata |= {f"{architecture.name}.{key}": value for key, value in values.items()}
    if not isinstance(drafter, Eagle3Config):
        metadata[f"{tokenizer.KEY}mask_token_id"] = drafter.mask_token_id
    return metadata


def check_planned(target: dict, draft: DraftConfig) -> None:
    """Refuse a drafter that a draft stage will make for a target, as `to_metadata`."""
    sizes = model_arguments(config.text_config(target))
    planned = ARCHITECTURES[draft.architecture].config_class.for_target(
        target,
        draft.drafter,
        width=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        num_blocks=sizes.num_hidden_layers,
        mask_token_id=0,
    )
    is_eagle3 = isinstance(planned, Eagle3Config)
    layer_ids = planned.layer_ids if is_eagle3 else planned.target_layer_ids
    to_metadata(planned, layer_ids, target)


def write(file: Path, drafter: Drafter, target: LoadedModel, *, name: str) -> None:
    """Write the file of a drafter, and verify it by reading it.

    Args:
        drafter: as stored, without a target.

    Raises:
        UserError: it was made for another target, llama.cpp lacks it, or something
            differs after reading the file.
    """
    place, rows = str(target.path), embedding_rows(target)
    drafter.choose_layers(len(target.model.layers))
    width = require_hidden_states(target.model, drafter.layer_ids, place=place)
    drafter.require_shape(width, rows, place=place)
    metadata = to_metadata(drafter.config, drafter.layer_ids, target.config)
    metadata |= tokenizer.to_metadata(target, rows, name=name)
    metadata[f"{metadata['general.architecture']}.vocab_size"] = rows
    write_file(file, metadata, lambda: _tensors(drafter, rows))
    _verify(file, drafter, target)


def _architecture(drafter: AttentionConfig) -> Architecture:
    return EAGLE3 if isinstance(drafter, Eagle3Config) else DFLASH


def _layer_config(drafter: AttentionConfig) -> dict[str, Any]:
    """The config of a Llama model with such layers."""
    return drafter.attention_json() | {"model_type": "llama"}


def _tensors(drafter: Drafter, vocab_size: int) -> Iterator[StoredTensor]:
    """All tensors of a file with so many tokens."""
    architecture, head = _architecture(drafter.config), drafter.config.head_dim
    for name, factors in config.rope_tensors(_layer_config(drafter.config)).items():
        yield name, "F32", factors, None
    for name, value in _parameters(drafter).items():
        ggml_type, stored = blocks.from_dense(value)
        path = name.rpartition(".")[0]
        rows = row_order(path, stored, head, architecture)
        yield stored_name(name, architecture), ggml_type, rows, None
    tokens = _draft_tokens(drafter, vocab_size)
    if tokens is not None:
        yield DRAFT_TOKENS, "I64", tokens, None


def _parameters(drafter: Drafter) -> dict[str, mx.array]:
    """The weights under the names of a model with such layers."""
    weights = dict(tree_flatten(drafter.parameters()))
    weights.pop(DRAFT_TOKENS, None)
    outer = ("layers.", "norm.")
    return {f"model.{n}" if n.startswith(outer) else n: w for n, w in weights.items()}


def _draft_tokens(drafter: Drafter, vocab_size: int) -> np.ndarray | None:
    """The token of every row of the LM head, int64; None if the rows are the tokens."""
    if not isinstance(drafter.config, Eagle3Config):
        return None
    count = drafter.draft_vocab_size
    if count == vocab_size:
        return None
    return np.array(drafter.target_tokens(mx.arange(count))).astype(np.int64)


def _verify(file: Path, drafter: Drafter, target: LoadedModel) -> None:
    """Read a file and compare every tensor, and the tokenizer on a test text."""
    metadata, stored = reader.read(file)
    with TemporaryDirectory() as scratch:
        tokenizer.write(metadata, Path(scratch), source=file.parent)
        differing = differing_tokenizer(Path(scratch), target.path)
    architecture, head = _architecture(drafter.config), drafter.config.head_dim
    factors = config.rope_tensors(_layer_config(drafter.config))
    expected = {name: mx.array(value) for name, value in factors.items()}
    orders = {}
    for name, value in _parameters(drafter).items():
        path, key = name.rpartition(".")[0], stored_name(name, architecture)
        expected[key] = value
        order = gguf_importer.row_order(path, len(value), head, architecture)
        orders[key] = slice(None) if order is None else mx.array(order)
    tokens = _draft_tokens(drafter, embedding_rows(target))
    read_tokens = stored.pop(DRAFT_TOKENS, None)
    read_tokens = read_tokens and read_tokens.blocks.view(np.int64).reshape(-1)
    if not np.array_equal(tokens, read_tokens):
        differing.append(DRAFT_TOKENS)
    differing += sorted(stored.keys() ^ expected.keys())
    for name in expected.keys() & stored.keys():
        value = blocks.to_dense(stored[name])[orders.get(name, slice(None))]
        differing += [] if equals(expected[name], value) else [name]
    require_equal(file, differing)


def _unsupported(what: str) -> UserError:
    return UserError(f"GGUF export of drafters {what} is not supported", code=FAILED)
