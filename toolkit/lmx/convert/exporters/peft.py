"""The trained adapter in the format of Hugging Face's peft."""

import json
from pathlib import Path

import mlx.core as mx

from ...errors import FAILED, UserError
from ...models import safetensors_io
from ..importers import peft as foreign
from .base import ExportContext
from .hf import require

FOLDER = "peft"


def publish(folder: Path, published: ExportContext) -> None:
    """Write the adapter that was trained, and read it back.

    Raises:
        UserError: none was trained, or peft has no such adapter.
    """
    if published.adapters is None:
        raise UserError(
            "no adapter was trained, so there is none to export as peft",
            hint="train with `adapter:`, or leave peft out of formats",
        )
    require(published.load(published.model).config)
    config = json.loads((published.adapters / foreign.CONFIG).read_text())
    tensors = mx.load(str(published.adapters / "adapters.safetensors"))
    write(folder, dict(tensors), config)
    verify_roundtrip(folder, tensors, config)


def write(folder: Path, tensors: dict[str, mx.array], config: dict) -> None:
    """Write an adapter into an existing, empty folder.

    Args:
        tensors: by mlx-lm's names.
        config: mlx-lm's adapter config; `model`, where it is there, names the base.

    Raises:
        UserError: a layer whose adapter peft does not have.
    """
    leaves = {own: (leaf, turned) for leaf, (own, turned) in foreign.LEAVES.items()}
    named = {}
    for name, value in tensors.items():
        path, _, own = name.rpartition(".")
        if own not in leaves or value.ndim > 2 or "embed" in path:
            raise UserError(
                f"peft has no such adapter as that of {path}",
                hint="leave embeddings and experts out of adapter.layers, or peft out "
                "of formats",
                code=FAILED,
            )
        leaf, turned = leaves[own]
        named[f"{foreign.PREFIX}{path}.{leaf}"] = value.T if turned else value
    paths = sorted({name.rpartition(".")[0] for name in tensors})
    safetensors_io.write_safetensors(folder / foreign.WEIGHTS, named)
    text = json.dumps(settings(config, paths), indent=2) + "\n"
    (folder / foreign.CONFIG).write_text(text)


def settings(config: dict, paths: list[str]) -> dict:
    """peft's LoraConfig for mlx-lm's adapter config on the layers of these paths."""
    own = config["lora_parameters"]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.get("model"),
        "inference_mode": True,
        "r": own["rank"],
        "lora_alpha": own["scale"] * own["rank"],
        "lora_dropout": own["dropout"],
        "use_dora": config["fine_tune_type"] == "dora",
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": paths,
    }


def verify_roundtrip(folder: Path, wanted: dict[str, mx.array], config: dict) -> None:
    """Read a folder back as mlx-lm's and compare.

    Raises:
        UserError: another adapter came back.
    """
    found, back = foreign.read(folder)
    same = found.keys() == wanted.keys() and all(
        mx.array_equal(found[name], value) for name, value in wanted.items()
    )
    own, read = config["lora_parameters"], back["lora_parameters"]
    close = abs(read["scale"] - own["scale"]) <= 1e-6 * own["scale"]
    if not (same and close and read["rank"] == own["rank"]):
        raise UserError(
            "the adapter is read back otherwise than it was; nothing is published",
            place=str(folder),
            code=FAILED,
        )
