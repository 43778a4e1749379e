"""The multi-token-prediction (MTP) head of Qwen3.5 and Qwen3-Next models.

One decoder layer with full attention (arXiv 2412.19437, section 2.2). At position i it
reads the target's normalized output there and the embedding of token i + 1, and
predicts token i + 2. For further tokens it reads its own output.
"""

import copy
from pathlib import Path
from typing import Self

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ... import cpu
from ...errors import UserError
from ...run.fs import read_json
from ..checkpoint import read_config
from ..global_scale import support_cpus
from ..hooks import find_blocks
from ..loader import LoadedModel, build_model, cast, kv_cache, stored_dtype
from ..mtp_weights import (
    MODEL_TYPES,
    SPLIT_MODEL_TYPE,
    layer_grid,
    quantized_layers,
    read_mtp,
)
from ..safetensors_io import require_tensors
from .base import TargetHead

HINT = "--draft-model prompt-lookup works with every model"


class MTPHead(nn.Module):
    """The MTP head of one model, which shares the model's embedding and LM head.

    Args:
        config: the model's config.json.
        model: the model, loaded.

    Attributes:
        layer_ids: the target's block, from 0, whose output it reads.
    """

    def __init__(self, config: dict, model: nn.Module):
        super().__init__()
        text = config | (config.get("text_config") or {})
        width, eps = text["hidden_size"], text.get("rms_norm_eps", 1e-6)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps)
        self.layers = _decoder_layers(config, text.get("mtp_num_hidden_layers") or 1)
        self.norm = nn.RMSNorm(width, eps)
        blocks = find_blocks(model)
        self.layer_ids = (len(blocks.trunk[blocks.name]) - 1,)
        # `nn.Module` does not treat names with an underscore as parameters.
        self._target, self._blocks = TargetHead(model), blocks

    @classmethod
    def load(cls, source: str | Path, target: LoadedModel) -> Self:
        """The head of a model, in the type in which the model computes.

        Args:
            source: the model's own folder, or one that `is_split_head`.

        Raises:
            UserError: the folder has no MTP head, or it is not of this model.
        """
        folder, config = Path(source).expanduser(), target.config
        if folder != target.path:
            config = read_config(folder)
        tensors = read_mtp(folder, config)
        kind = target.config["model_type"]
        if not tensors or kind not in MODEL_TYPES:
            raise UserError(
                f"this {kind} model has no multi-token-prediction head (mtp.*)",
                place=str(folder),
                hint=f"model types with one: {', '.join(MODEL_TYPES)}; {HINT}",
            )
        head = cls(target.config, target.model)
        grids = {path: layer_grid(path, config) for path in quantized_layers(tensors)}
        nn.quantize(head, class_predicate=lambda path, _: grids.get(path, False))
        hint = "its mtp.* is damaged, or of another model"
        parameters = dict(tree_flatten(head.parameters()))
        require_tensors(tensors, parameters, place=str(folder), hint=hint)
        support_cpus(head)
        head.load_weights(list(tensors.items()))
        cast(head, stored_dtype(target.model))
        head.eval()
        cpu.enable(head)
        mx.eval(head.parameters())
        return head

    def make_cache(self) -> list:
        """New caches of its layers, for one sequence."""
        return [kv_cache() for _ in self.layers]

    def target_states(self, states: mx.array) -> mx.array:
        """What it reads of outputs [B, L, width] of that block of the target."""
        return self._blocks.trunk.norm(states)

    def __call__(self, tokens: mx.array, states: mx.array, caches: list) -> mx.array:
        """Outputs [B, L, width], from which `logits` predicts.

        Args:
            tokens: int [B, L], the tokens after those of `states`.
            states: [B, L, width], `target_states` or outputs of the head.
            caches: of all positions before; these are added.
        """
        embeddings = self.pre_fc_norm_embedding(self._target.embed(tokens))
        pairs = [embeddings, self.pre_fc_norm_hidden(states)]
        hidden = self.fc(mx.concatenate(pairs, axis=-1))
        mask = "causal" if tokens.shape[1] > 1 else None
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, mask=mask, cache=cache)
        return self.norm(hidden)

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits [..., V] of outputs [..., width]: of the token after the next."""
        return self._target.logits(hidden)


def is_split_head(source: str | Path) -> bool:
    """Whether a local folder has a head alone, as mlx-vlm's `split_mtp` writes it."""
    file = Path(source).expanduser() / "config.json"
    return file.is_file() and read_json(file).get("model_type") == SPLIT_MODEL_TYPE


def _decoder_layers(config: dict, count: int) -> list[nn.Module]:
    """Decoder layers of the model's own architecture, all with full attention."""
    config = copy.deepcopy(config)
    for block in (config, config.get("text_config") or {}):
        block |= {"num_hidden_layers": count, "full_attention_interval": 1}
    blocks = find_blocks(build_model(config))
    return blocks.trunk[blocks.name]
