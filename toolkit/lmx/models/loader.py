"""Load and build models and tokenizers with mlx-lm.

Only this module, the exporters and lm-eval's wrapper import mlx-lm.
"""

import copy
import importlib.util
import os
import re
import resource
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import cpu
from ..config.quant_spec import KV_CACHE_BITS
from ..cpu.memory import keep_resident
from ..data.tokenizer_files import check_tokenizer_files, eos_token_ids
from ..errors import UserError, library_errors
from ..files.json_files import object_in
from ..interfaces import SINGLE_PROCESS, Communicator
from . import config_check, global_scale, rope_parameters, tensor_parallel, token_ids
from .architecture_fixes import repair
from .checkpoint import (
    check_weights,
    config_int,
    load_options,
    missing_shards,
    read_config,
)
from .dtypes import cast, compute_dtype, stored_dtype
from .lora.io import load_adapter
from .pipeline_parallel import is_divided_by_layers
from .quantized_layers import replace_qq_layers

CHECKPOINT_PATTERNS = [
    *("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"),
    "additional_chat_templates/*.jinja",
]
# Some repositories hold all weights twice, once in their authors' own layout.
DUPLICATE_WEIGHTS = ["consolidated*.safetensors"]
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# mlx-lm rounds AWQ's biases and misreads GPTQ's words; convert.importers does neither.
IMPORTED_METHODS = ("awq", "gptq")
MODULE_NAME = re.compile(r"[A-Za-z0-9_-]+")
# mlx-lm's modules that tokenizer_config.json may name.
PLUGINS = {"tool_parser_type": "tool_parsers", "chat_template_type": "chat_templates"}
# Layers whose parameters are floating-point numbers, unless quantized.
DENSE = (nn.Linear, nn.Embedding, nn.RMSNorm, nn.LayerNorm, nn.Conv1d)
# In config.json, ignored by mlx-lm: bits of the KV cache of every layer.
KV_BITS = "kv_bits"


@dataclass(frozen=True)
class LoadedModel:
    """A model as it was loaded.

    Attributes:
        dtype: the type that the checkpoint stores; parameters in `model` may have been
            cast to another type for computing.
        reread: loads the model again, its weights unread until they are used.
    """

    model: nn.Module
    tokenizer: Any
    config: dict
    path: Path
    dtype: mx.Dtype
    reread: Callable[[], nn.Module]

    @property
    def kv_bits(self) -> list[int] | None:
        """Bits of the KV cache of every layer, if the checkpoint names them.

        Raises:
            UserError: they are no list of bits.
        """
        bits = self.config.get(KV_BITS)
        if bits is None:
            return None
        if not isinstance(bits, list) or not all(bit in KV_CACHE_BITS for bit in bits):
            raise UserError(
                f"{KV_BITS} must be a list of 2 to 6, 8 or 16, one for each layer, got "
                f"{bits!r}",
                place=str(self.path / "config.json"),
                hint=f"remove {KV_BITS} to keep the dtype of the model",
            )
        return bits


def load(
    source: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    compute: str = "auto",
    lazy: bool = False,
    adapter: str | Path | None = None,
    group: Communicator = SINGLE_PROCESS,
) -> LoadedModel:
    """Load an MLX checkpoint: a folder or a Hub id.

    Checkpoints and adapters in other formats (GGUF, GPTQ, AWQ, compressed-tensors,
    peft) go through `convert.importers.resolve_checkpoint` and `resolve_adapter` first.

    Args:
        compute: "auto" (float32 on the CPU, where 16-bit matmuls are up to 50 times
            slower, else as stored), "stored", or the name of a type.
        lazy: read weights when they are first used.
        adapter: folder of a LoRA or DoRA adapter in mlx-lm's format.
        group: processes of which each holds a part of the model, and one weight of the
            whole model at a time; see `tensor_parallel`.

    Raises:
        UserError: no such model, not a model, an unknown architecture, damaged files,
            an adapter of another model, or a model that the group cannot divide.
    """
    keep_resident()
    path = checkpoint_folder(
        source, revision=revision, trust_remote_code=trust_remote_code
    )
    own_config = check_loadable(path, trust_remote_code=trust_remote_code)

    if adapter and group.size > 1:
        raise UserError("a model with an adapter cannot be divided among processes")

    def read(group: Communicator = group) -> tuple[nn.Module, dict, mx.Dtype]:
        model, config = _build(path, own_config, trust_remote_code)
        dtype = stored_dtype(model)
        if group.size > 1:
            tensor_parallel.shard(model, group, lambda: read(SINGLE_PROCESS)[0])
            if not is_divided_by_layers(model):
                _check_forward_pass(model, path)
        if adapter:
            with _mlx_lm():
                from mlx_lm.tuner.utils import linear_to_lora_layers
            folder = Path(os.path.expanduser(adapter))
            load_adapter(model, folder, linear_to_lora_layers)
        if compute != "stored":
            cast(model, compute_dtype(compute, dtype))
        cpu.enable(model)
        return model, config, dtype

    model, config, dtype = read()
    if not lazy:
        with _load_errors(path):
            # For a part of a weight, the whole is read: in a group, one at a time.
            for _, weight in tree_flatten(model.parameters()) if group.size > 1 else ():
                mx.eval(weight)
            mx.eval(model.parameters())
    # mlx-lm keeps only the end tokens that generation_config.json names.
    if ids := eos_token_ids(path):
        config["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    return LoadedModel(model, tokenizer, config, path, dtype, lambda: read()[0])


def _build(path: Path, config: dict, trust_remote_code: bool) -> tuple[nn.Module, dict]:
    """A model whose weights are unread, as they are stored, and its config."""
    with _mlx_lm() as utils, _load_errors(path):

        def repaired_classes(config: dict) -> tuple[Callable[[Any], nn.Module], type]:
            """mlx-lm's classes, whose models are repaired before they load."""
            model_class, arguments = utils._get_classes(config)
            return lambda args: _prepare(model_class(args), config), arguments

        model, config = utils.load_model(
            path,
            lazy=True,
            trust_remote_code=trust_remote_code,
            **load_options(path, config, repaired_classes),
        )
    replace_qq_layers(model)
    global_scale.support_cpus(model)
    # MLX would compute with integers in place of numbers.
    for name, module in model.named_modules():
        for leaf in ("weight", "bias") if type(module) in DENSE else ():
            if leaf in module and not mx.issubdtype(module[leaf].dtype, mx.floating):
                raise UserError(
                    f"{name}.{leaf} has values of {module[leaf].dtype}, which are no "
                    "weights",
                    place=str(path),
                    hint="copy the weight files again, or import them: lmx convert",
                )
    _check_forward_pass(model, path)
    return model, config


def checkpoint_folder(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Path:
    """The local folder of a checkpoint: the folder itself or the snapshot of a Hub id.

    Raises:
        UserError: `source` is a file, or neither a folder nor a model of the Hub.
    """
    path = Path(os.path.expanduser(source))
    if os.path.isfile(path):
        raise UserError("a checkpoint is a folder; this is a file", place=str(source))
    if os.path.exists(path):
        return path
    return download_snapshot(source, revision, trust_remote_code)


def download_snapshot(
    source: str | Path, revision: str | None = None, trust_remote_code: bool = False
) -> Path:
    """The local folder of a Hub id; files that are not cached are downloaded.

    Raises:
        UserError: this cannot be a Hub id, or the Hub does not have it.
    """
    if not HUB_ID.fullmatch(str(source)):
        raise UserError("there is no such folder", place=str(source))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        folder = snapshot_download(
            str(source),
            revision=revision,
            allow_patterns=CHECKPOINT_PATTERNS + ["*.py"] * trust_remote_code,
            ignore_patterns=DUPLICATE_WEIGHTS,
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UserError(
            f"no folder of this name, and the Hub does not give it: {first_line}",
            place=str(source),
            hint="check the name; offline, only models already downloaded are found",
        ) from error
    return Path(folder)


def check_loadable(path: Path, *, trust_remote_code: bool = False) -> dict:
    """The config of a checkpoint folder, checked without loading weights.

    Values that the file leaves to transformers' defaults are filled in.

    Raises:
        UserError: no config, an unknown architecture, code in the checkpoint that is
            not trusted, another program's quantization, no weights, or damaged files.
    """
    config = read_config(path)
    place = str(path / "config.json")
    quantization = config.get("quantization_config")
    method = isinstance(quantization, dict) and quantization.get("quant_method")
    if method in IMPORTED_METHODS:
        raise UserError(
            f"this checkpoint is in {method} format, not in MLX format",
            place=place,
            hint="convert it first: lmx convert SOURCE TARGET",
        )
    check_weights(path, config)
    if "model_file" not in config:
        return complete_config(config, place=place)
    if not trust_remote_code:
        raise UserError(
            f"this model needs Python code from its checkpoint "
            f"({config['model_file']}), which runs only with trust_remote_code",
            place=place,
            hint="review the code, then set trust_remote_code: true",
        )
    return config


def complete_config(config: dict, *, place: str) -> dict:
    """A config with the values that it leaves to transformers' defaults.

    Raises:
        UserError: mlx-lm has no such architecture, or a value is missing or wrong.
    """
    _, arguments = model_classes(config, place=place)
    with _mlx_lm() as utils, _config_errors(place):
        config = utils._decode_tagged_floats(config)
        # Its type differs among architectures, and `complete` adapts it.
        checked = {k: v for k, v in config.items() if k != "sliding_window_pattern"}
        config_check.check_arguments(checked, arguments, place)
        config = config_check.complete(config, arguments, utils._get_classes, place)
    model_arguments(config, place=place)
    return config


def _config_errors(place: str | Path):
    hint = config_check.HINT
    return library_errors("mlx-lm rejects the config", place=place, hint=hint)


def _load_errors(path: Path):
    """Turn whatever mlx-lm and MLX raise about a folder into a UserError."""
    missing = missing_shards(path)
    hint = f"{missing[0]} is missing" if missing else "are all its files of one model?"
    return library_errors("the model does not load", place=path, hint=hint)


def _check_forward_pass(model: nn.Module, path: Path) -> None:
    """Refuse a config whose sizes do not fit together or to the weights.

    MLX checks the shapes when it records the computation of a token. Nothing is
    computed, and no weight is read.

    Raises:
        UserError: the model cannot compute.
    """
    place = path / "config.json"
    with library_errors("the model cannot run", place=place, hint=config_check.HINT):
        model(mx.zeros((1, 2), mx.int32), cache=make_cache(model))


def model_classes(config: dict, *, place: str | None = None):
    """mlx-lm's (Model, ModelArgs) classes for a config.

    Raises:
        UserError: mlx-lm has no such architecture.
    """
    unknown = UserError(
        f"mlx-lm has no model type {config['model_type']!r}",
        place=place,
        hint="update mlx-lm, or choose another model",
    )
    if not MODULE_NAME.fullmatch(config["model_type"]):
        raise unknown
    with _mlx_lm() as utils:
        try:
            return utils._get_classes(config)
        # Some of its modules are not models; one exits if a package is missing.
        except (ValueError, AttributeError, ImportError, SystemExit) as error:
            raise unknown from error


def build_model(config: dict, *, place: str | Path = "config.json") -> nn.Module:
    """A model of this config with mlx-lm's random initial weights, float32.

    Args:
        place: where the config is from, for messages.

    Raises:
        UserError: mlx-lm has no such architecture, or cannot build it.
    """
    model_class, _ = model_classes(config, place=str(place))
    arguments = model_arguments(config, place=place)
    message = "mlx-lm cannot build this model"
    with library_errors(message, place=place, hint=config_check.HINT):
        return _prepare(model_class(arguments), config)


def model_arguments(config: dict, *, place: str | Path = "config.json") -> Any:
    """The values of a config that its architecture reads, with mlx-lm's defaults.

    Raises:
        UserError: mlx-lm has no such architecture, or a value is missing or wrong.
    """
    _, arguments_class = model_classes(config, place=str(place))
    config_check.check_arguments(config, arguments_class, str(place))
    with _config_errors(place):
        # mlx-lm changes some of the values in place.
        return arguments_class.from_dict(copy.deepcopy(config))


def _prepare(model: nn.Module, config: dict) -> nn.Module:
    repair(model, config)
    # Before the model computes: mlx-lm's compiled functions keep what they were traced
    # with, so a later replacement would change the rounding of the same model.
    cpu.enable()
    with _mlx_lm():
        from mlx_lm.models.rope_utils import SuScaledRoPE, initialize_rope
    rope_parameters.use_scaling(model, config, initialize_rope)
    rope_parameters.use_short_factors(model, config, SuScaledRoPE)
    return model


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder, in mlx-lm's wrapper.

    Raises:
        UserError: the folder has no tokenizer, or it cannot be read.
    """
    # Imports jinja2.
    from ..data.chat.rendering import ChatTemplate, limit_templates

    limit_templates()
    settings = check_tokenizer_files(path)
    # Without this key, Hugging Face would ask on the terminal.
    options = {"trust_remote_code": trust_remote_code}
    ids = eos_token_ids(path) or None
    with _mlx_lm() as utils:
        for key, package in PLUGINS.items():
            name = settings.get(key)
            if name is not None and not (
                MODULE_NAME.fullmatch(name)
                and importlib.util.find_spec(f"mlx_lm.{package}.{name}")
            ):
                raise UserError(
                    f"mlx-lm has no {key} {name[:40]!r}",
                    place=str(path / "tokenizer_config.json"),
                    hint=f"remove {key}, or update mlx-lm",
                )
        try:
            with _tokenizer_errors(path):
                tokenizer = utils.load_tokenizer(path, options, eos_token_ids=ids)
                # Some files have SentencePiece's decoder for a byte-level vocabulary.
                if "Ġ" in tokenizer.decode(tokenizer.encode("a a")):
                    from tokenizers import decoders

                    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
        except UserError:
            # If this file alone is damaged, the error names it.
            if (file := path / "tokenizer.json").is_file():
                from tokenizers import Tokenizer

                with _tokenizer_errors(file):
                    Tokenizer.from_file(str(file))
            raise
    if rows := config_int(object_in(path / "config.json"), "vocab_size"):
        token_ids.guard(tokenizer, rows)
    names = tokenizer.chat_template
    if isinstance(names, dict) and "default" not in names:
        raise UserError(
            f"no chat template has the name 'default', only {', '.join(names)}",
            place=str(path),
            hint="give one of them this name in tokenizer_config.json, or copy it to "
            "chat_template.jinja",
        )
    template = ChatTemplate(tokenizer)
    if template.exists and template.ignores_messages:
        text = f"{path}: the chat template writes no text of a user's message"
        warnings.warn(text, stacklevel=2)
    return tokenizer


def _tokenizer_errors(place: Path):
    hint = "a checkpoint needs tokenizer.json and tokenizer_config.json"
    return library_errors("the tokenizer does not load", place=place, hint=hint)


def make_cache(model: nn.Module) -> list:
    """New mlx-lm cache objects of the kinds that the model uses, one per layer."""
    with _mlx_lm():
        from mlx_lm.models.cache import make_prompt_cache
    return make_prompt_cache(model)


def kv_cache() -> Any:
    """A new mlx-lm cache of one layer with full attention."""
    with _mlx_lm():
        from mlx_lm.models.cache import KVCache
    return KVCache()


def make_rope(head_dim: int, config: dict) -> nn.Module:
    """A rotary embedding.

    Args:
        config: `rope_theta`, `rope_scaling` and `max_position_embeddings`, as in a
            config.json of Hugging Face.
    """
    with _mlx_lm():
        from mlx_lm.models.rope_utils import initialize_rope
    return initialize_rope(
        head_dim,
        config["rope_theta"],
        False,
        config["rope_scaling"],
        config["max_position_embeddings"],
    )


@contextmanager
def _mlx_lm():
    """mlx_lm.utils, imported so that it only raises the limit on open files."""
    setrlimit, resource.setrlimit = resource.setrlimit, _raise_limit(resource.setrlimit)
    try:
        utils = importlib.import_module("mlx_lm.utils")
    finally:
        resource.setrlimit = setrlimit
    yield utils


def _raise_limit(setrlimit: Callable[[int, tuple], None]) -> Callable:
    """`setrlimit` that gives what is asked for at most, as far as it is allowed."""

    def set_limit(kind: int, wanted: tuple[int, int]) -> None:
        soft, hard = resource.getrlimit(kind)
        unlimited = resource.RLIM_INFINITY
        most = max(wanted) if hard == unlimited else min(hard, max(wanted))
        if soft != unlimited and soft < most:
            setrlimit(kind, (most, hard))

    return set_limit
