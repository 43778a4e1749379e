"""The only door to mlx-lm's model zoo and tokenizers: load, build, make caches."""

import importlib
import re
import resource
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import cpu
from ..data.tokenizer_files import eos_token_ids
from ..errors import UserError
from . import checkpoint_fixups
from .checkpoint import check_weights, missing_shards, read_config
from .dtypes import cast, stored_dtype

CHECKPOINT_PATTERNS = [
    "*.json",
    "*.safetensors",
    "*.model",
    "*.txt",
    "*.jinja",
    "*.tiktoken",
]
# Some repositories hold all weights twice, once as their authors' program has them.
TWICE = ["consolidated*.safetensors"]
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
FAULTS = (ValueError, RuntimeError, KeyError, TypeError, AttributeError, OSError)
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model as it was loaded.

    Attributes:
        dtype: the type its checkpoint stores; the parameters in `model` may have been
            cast to another for computing.
        reread: gives the model again, its weights unread until they are used.
    """

    model: nn.Module
    tokenizer: Any
    config: dict
    path: Path
    dtype: mx.Dtype
    reread: Callable[[], nn.Module]


def load(
    source: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    compute: str = "auto",
    lazy: bool = False,
    adapter: str | Path | None = None,
) -> LoadedModel:
    """Load an MLX checkpoint: a folder or a Hub id.

    Checkpoints and adapters in other formats (GGUF, GPTQ, AWQ, compressed-tensors,
    peft) go through `convert.importers.resolve_checkpoint` and `resolve_adapter` first.

    Args:
        adapter: folder of a LoRA or DoRA adapter in mlx-lm's format.
        compute: "auto" (float32 on the CPU, where 16-bit matmuls are up to 50 times
            slower, else as stored), "stored", or the name of a type.
        lazy: read weights when they are first used, and not here.

    Raises:
        UserError: no such model, not a model, an unknown architecture, damaged files,
            an adapter of another model.
    """
    path = checkpoint_folder(
        source, revision=revision, trust_remote_code=trust_remote_code
    )
    check_loadable(path, trust_remote_code=trust_remote_code)

    def read() -> tuple[nn.Module, dict, mx.Dtype]:
        return _read(path, trust_remote_code, compute, adapter)

    model, config, dtype = read()
    if not lazy:
        with _explaining(path):
            mx.eval(model.parameters())
    # mlx-lm keeps only what generation_config.json names.
    if ends := eos_token_ids(path):
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    return LoadedModel(model, tokenizer, config, path, dtype, lambda: read()[0])


def _read(path: Path, trust_remote_code: bool, compute: str, adapter):
    """A model whose weights are unread, its config, and the type it is stored in."""
    with _mlx_lm() as zoo, _explaining(path):
        model, config = zoo.load_model(
            path,
            lazy=True,
            trust_remote_code=trust_remote_code,
            **checkpoint_fixups.load_options(path, zoo._get_classes),
        )
    dtype = stored_dtype(_complete(model))
    if adapter:
        _adapt(model, Path(adapter).expanduser())
    if compute != "stored":
        cast(model, compute_dtype(compute, dtype))
    cpu.enable(model)
    return model, config, dtype


def checkpoint_folder(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Path:
    """The local folder of a checkpoint: the folder itself or the snapshot of a Hub id.

    Raises:
        UserError: `source` is a file, or neither a folder nor a model of the Hub.
    """
    path = Path(source).expanduser()
    if path.is_file():
        raise UserError("a checkpoint is a folder; this is a file", place=str(source))
    return (
        path
        if path.exists()
        else download_snapshot(source, revision, trust_remote_code)
    )


def download_snapshot(
    source: str | Path, revision: str | None = None, trust_remote_code: bool = False
) -> Path:
    """The folder that holds a Hub id's files on this disk, downloaded if need be.

    Raises:
        UserError: this cannot be a Hub id, or the Hub does not have it.
    """
    if not HUB_ID.fullmatch(str(source)):
        raise UserError("there is no such folder", place=str(source))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = CHECKPOINT_PATTERNS + (["*.py"] if trust_remote_code else [])
    chosen = {"allow_patterns": patterns, "ignore_patterns": TWICE}
    try:
        return Path(snapshot_download(str(source), revision=revision, **chosen))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UserError(
            f"no folder of this name, and the Hub does not give it: {first_line}",
            place=str(source),
            hint="check the name; offline, only models already downloaded are found",
        ) from error


def check_loadable(path: Path, *, trust_remote_code: bool = False) -> None:
    """Check a checkpoint folder as far as that needs no weights.

    Raises:
        UserError: no config, an unknown architecture, code of its own that nobody
            asked to run, no weights or damaged files.
    """
    config = read_config(path)
    place = str(path / "config.json")
    _require_mlx_format(config, place)
    check_weights(path)
    if "model_file" not in config:
        model_classes(config, place=place)
    elif not trust_remote_code:
        raise UserError(
            f"this model brings code of its own ({config['model_file']}), "
            "which is not run unasked",
            place=place,
            hint="read it, then set trust_remote_code: true",
        )


def _require_mlx_format(config: dict, place: str) -> None:
    quantization = config.get("quantization_config")
    method = isinstance(quantization, dict) and quantization.get("quant_method")
    # mlx-lm would read these too, but it rounds AWQ's biases and misreads GPTQ's words.
    if method in ("awq", "gptq"):
        raise UserError(
            f"this checkpoint is quantized in {method} format, not in MLX format",
            place=place,
            hint="import it first: lmx import SOURCE TARGET",
        )


def _adapt(model: nn.Module, folder: Path) -> None:
    with _mlx_lm():
        from mlx_lm.tuner.utils import load_adapters
    try:
        load_adapters(model, str(folder))
        mx.eval(model.parameters())
    except FAULTS as error:
        raise UserError(
            f"the adapter does not load: {str(error).splitlines()[0]}",
            place=str(folder),
            hint="is it of this model, with adapter_config.json beside it?",
        ) from error
    # Dropout is for training.
    model.eval()


@contextmanager
def _explaining(path: Path):
    """What mlx-lm fails with, in our words."""
    try:
        yield
    except FAULTS as error:
        raise _explained(path, error) from error


def _explained(path: Path, error: Exception) -> UserError:
    first, *more = str(error).split("\n")
    details = " ".join([first.strip(), *more[:3]]) + " ..." * (len(more) > 3)
    missing = missing_shards(path)
    return UserError(
        f"the model does not load: {details}",
        place=str(path),
        hint=f"{missing[0]} is missing"
        if missing
        else "are all its files of one model?",
    )


def model_classes(config: dict, *, place: str | None = None):
    """mlx-lm's (Model, ModelArgs) classes for a config.

    Raises:
        UserError: mlx-lm has no such architecture.
    """
    with _mlx_lm() as zoo:
        try:
            return zoo._get_classes(config)
        # Some of its modules are no models; one exits if a package is missing.
        except (ValueError, AttributeError, SystemExit) as error:
            raise UserError(
                f"mlx-lm has no model type {config['model_type']!r}",
                place=place,
                hint="update mlx-lm, or choose another model",
            ) from error


def build_model(config: dict) -> nn.Module:
    """A model of this config with mlx-lm's random initial weights, float32."""
    make, arguments = model_classes(config)
    return _complete(make(arguments.from_dict(config)))


def _complete(model: nn.Module) -> nn.Module:
    # mlx-lm's recurrent_gemma does not begin as a module does, and could not be frozen.
    if not hasattr(model, "_no_grad"):
        nn.Module.__init__(model)
    # Before the model computes: mlx-lm's compiled functions keep what they were traced
    # with, so a later replacement would change the rounding of the same model.
    cpu.enable()
    return model


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder, in mlx-lm's wrapper.

    Raises:
        UserError: the folder has none, or it cannot be read.
    """
    # Left out, Hugging Face would ask on the terminal.
    extra = {"trust_remote_code": trust_remote_code}
    ends = eos_token_ids(path) or None
    with _mlx_lm() as zoo:
        try:
            return zoo.load_tokenizer(path, extra, eos_token_ids=ends)
        except FAULTS as error:
            raise UserError(
                f"the tokenizer does not load: {str(error).splitlines()[0]}",
                place=str(path),
                hint="a checkpoint needs tokenizer.json and tokenizer_config.json",
            ) from error


def make_cache(model: nn.Module) -> list:
    """Fresh mlx-lm cache objects, one per layer, of the kinds the model asks for."""
    with _mlx_lm():
        from mlx_lm.models.cache import make_prompt_cache
    return make_prompt_cache(model)


def compute_dtype(name: str, stored: mx.Dtype) -> mx.Dtype:
    """The type to compute in: see `load`."""
    if name in DTYPES:
        return DTYPES[name]
    return mx.float32 if name == "auto" and cpu.on_cpu() else stored


@contextmanager
def _mlx_lm():
    """mlx_lm.utils, imported without its lowering of the limit on open files."""
    setrlimit, resource.setrlimit = resource.setrlimit, lambda *_: None
    try:
        utils = importlib.import_module("mlx_lm.utils")
    finally:
        resource.setrlimit = setrlimit
    yield utils
