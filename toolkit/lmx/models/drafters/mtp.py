"""The multi-token-prediction (MTP) head of Qwen3.5 and Qwen3-Next models.

One decoder layer with full attention (arXiv 2412.19437, section 2.2). At position i it
reads the target's normalized output there and the embedding of token i + 1, and
predicts token i + 2. For further tokens it reads its own output.

mlx-lm drops the tensors `mtp.*` of a checkpoint. Here they stay beside the model, in
`mtp.safetensors`: mlx-lm reads only model*.safetensors, and mlx-vlm's `split_mtp` reads
every file. The index of the model does not name it. Hugging Face stores the norms of
these models as offsets from one, and the projections of experts joined or one by one.
MLX's layout has the norms themselves and stacked experts. Like mlx-vlm, this module
takes a file for MLX's if its metadata says `format: mlx`.
"""

import copy
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ... import cpu
from ...errors import UserError
from ...files.atomic import copy_file
from ...files.json_files import read_json
from .. import global_scale
from ..checkpoint import GRID_TENSORS, read_config, tensor_files
from ..dtypes import cast, stored_dtype
from ..hooks import find_blocks
from ..loader import LoadedModel, build_model, kv_cache
from ..quantized_layers import dequantize_groups
from ..safetensors_io import read_header, require_tensors, write_safetensors
from .base import TargetHead

MTP_FILE = "mtp.safetensors"
PREFIX = "mtp."
MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
# A folder that mlx-vlm made of a head alone. Its tensors have no prefix.
SPLIT_MODEL_TYPE = "qwen3_5_mtp"
JOINED_EXPERTS = re.compile(r"(.*)\.experts\.(gate_up_proj|down_proj)")
SINGLE_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
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
        # Layers of the model's own architecture, all with full attention.
        own, count = copy.deepcopy(config), text.get("mtp_num_hidden_layers") or 1
        for block in (own, own.get("text_config") or {}):
            block |= {"num_hidden_layers": count, "full_attention_interval": 1}
        blocks = find_blocks(build_model(own))
        self.layers = blocks.trunk[blocks.name]
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
        folder, config = Path(os.path.expanduser(source)), target.config
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
        global_scale.support_cpus(head)
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
    file = Path(os.path.expanduser(source)) / "config.json"
    is_file = os.path.isfile(file)
    return is_file and read_json(file).get("model_type") == SPLIT_MODEL_TYPE


def read_mtp(folder: Path, config: dict) -> dict[str, mx.array]:
    """The tensors of a checkpoint's MTP head in MLX's layout, unread.

    Returns:
        tensors by their names after `mtp.`; none if the checkpoint has no head, or one
        of another family. All tensors of a folder that mlx-vlm split off.

    Raises:
        UserError: a file is damaged, or an expert is missing.
    """
    tensors: dict[str, mx.array] = {}
    for file in _mtp_files(folder, config):
        arrays, is_mlx = _load(file)
        if config["model_type"] != SPLIT_MODEL_TYPE:
            arrays = {n: v for n, v in arrays.items() if n.startswith(PREFIX)}
        tensors |= arrays if is_mlx else as_mlx(arrays, place=str(folder))
    return {name.removeprefix(PREFIX): value for name, value in tensors.items()}


def as_mlx(tensors: dict[str, mx.array], *, place: str) -> dict[str, mx.array]:
    """The tensors of a head in Hugging Face's layout, in MLX's.

    Args:
        tensors: by their full names.

    Raises:
        UserError: an expert is missing.
    """
    # Only the weights of norms are vectors.
    is_norm = {n: n.endswith(".weight") and v.ndim == 1 for n, v in tensors.items()}
    tensors = {n: v + 1 if is_norm[n] else v for n, v in tensors.items()}
    stacked: dict[str, mx.array] = {}
    # By path, and by number.
    single: dict[str, dict[int, mx.array]] = {}
    for name, value in tensors.items():
        if match := SINGLE_EXPERT.fullmatch(name):
            block, index, layer = match.groups()
            path = f"{block}.switch_mlp.{layer}.weight"
            single.setdefault(path, {})[int(index)] = value
        elif match := JOINED_EXPERTS.fullmatch(name):
            block, layer = match.groups()
            layers = ("gate_proj", "up_proj") if "gate" in layer else (layer,)
            parts = mx.split(value, len(layers), axis=-2)
            for layer, part in zip(layers, parts, strict=True):
                stacked[f"{block}.switch_mlp.{layer}.weight"] = part
        else:
            stacked[name] = value
    for path, experts in single.items():
        if experts.keys() != set(range(len(experts))):
            raise UserError(f"an expert of {path} is missing", place=place)
        stacked[path] = mx.stack([experts[index] for index in range(len(experts))])
    return stacked


def copy_mtp(source: Path, target: Path, config: dict) -> None:
    """Write the MTP head of a checkpoint, if it has one, into another folder.

    Quantized layers are dequantized: the `quantization` of the other model's config
    need not have their grid.

    Args:
        config: that of the source.

    Raises:
        UserError: a file is damaged, an expert is missing, or a value is not finite.
    """
    tensors = read_mtp(source, config)
    if not tensors:
        return
    paths, file = quantized_layers(tensors), source / MTP_FILE
    if not paths and _mtp_files(source, config) == [file] and _load(file)[1]:
        copy_file(file, target / MTP_FILE)
        return
    for path in paths:
        names = {leaf: f"{path}.{leaf}" for leaf in ("weight", *GRID_TENSORS)}
        parts = {k: tensors.pop(name) for k, name in names.items() if name in tensors}
        tensors[names["weight"]] = dequantize(parts, layer_grid(path, config))
    renamed = {f"{PREFIX}{name}": value for name, value in tensors.items()}
    tensors.clear()
    write_safetensors(target / MTP_FILE, renamed)


def quantized_layers(tensors: dict[str, mx.array]) -> list[str]:
    """Paths of the layers whose weights are codes."""
    scales = (name for name in tensors if name.endswith(".scales"))
    return [name.removesuffix(".scales") for name in scales]


def layer_grid(path: str, config: dict) -> dict:
    """`group_size`, `bits` and `mode` of a quantized layer of the head, and
    `global_scale` if it has one.

    Raises:
        UserError: the config has no such numbers.
    """
    block = config.get("quantization") or {}
    layer = block.get(f"{PREFIX}{path}", block.get(path))
    grid = block | (layer if isinstance(layer, dict) else {})
    if "bits" not in grid or "group_size" not in grid:
        raise UserError(f"{PREFIX}{path} has scales, but the config has no grid for it")
    return {
        "group_size": grid["group_size"],
        "bits": grid["bits"],
        "mode": grid.get("mode", "affine"),
    } | ({"global_scale": True} if grid.get("global_scale") else {})


def dequantize(parts: dict[str, mx.array], grid: dict) -> mx.array:
    """The weight of a layer, in the type of its scales; bfloat16 if these are codes.

    Args:
        parts: `weight` (codes), `scales`, `biases` if affine, and `global_scale` if
            the grid has it.
        grid: as from `layer_grid`.
    """
    if grid.get("global_scale"):
        parts = [parts[name] for name in ("weight", "scales", "global_scale")]
        return global_scale.dequantize(*parts).astype(mx.bfloat16)
    dtype = parts["scales"].dtype
    is_code = not mx.issubdtype(dtype, mx.floating)
    weight = dequantize_groups(parts, SimpleNamespace(**{"mode": "affine"} | grid))
    return weight.astype(mx.bfloat16 if is_code else dtype)


def _mtp_files(folder: Path, config: dict) -> list[Path]:
    """The files with tensors of the head; those of the model come before others."""
    kind = config.get("model_type")
    if kind not in (*MODEL_TYPES, SPLIT_MODEL_TYPE):
        return []
    in_model = tensor_files(folder)
    if kind == SPLIT_MODEL_TYPE:
        return sorted(set(in_model.values()))
    files = {in_model[name] for name in in_model if name.startswith(PREFIX)}
    for file in () if files else folder.glob("mtp*.safetensors"):
        if any(name.startswith(PREFIX) for name in read_header(file)):
            files.add(file)
    return sorted(files)


def _load(file: Path) -> tuple[dict[str, mx.array], bool]:
    """The tensors of a file, unread, and whether they are in MLX's layout."""
    tensors, metadata = mx.load(str(file), return_metadata=True)
    return tensors, metadata.get("format") == "mlx"
