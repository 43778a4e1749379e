"""The trained adapter in the format of Hugging Face's peft."""

import json
from pathlib import Path

import mlx.core as mx

from ...errors import FAILED, UserError
from ...models import safetensors_io
from ...models.lora.io import read_adapter
from ..importers import peft as peft_importer
from .base import ExportContext, FormatCard
from .hf import check_supported as check_hf_supported

FOLDER = "peft"
CARD = FormatCard(
    kind="An adapter",
    library="peft",
    tags=("lora",),
    language="python",
    usage="""\
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained(".")
""",
    suffix="-lora",
    is_adapter=True,
)


def export(folder: Path, context: ExportContext) -> None:
    """Write the trained adapter and verify it.

    Raises:
        UserError: no adapter was trained, or peft cannot hold it.
    """
    if context.adapters is None:
        raise UserError(
            "no adapter was trained, so there is none to export as peft",
            hint="train with `adapter:`, or remove peft from formats",
        )
    check_hf_supported(context.load(context.model).config)
    adapter, tensors = read_adapter(context.adapters)
    config = adapter.model_dump()
    write(folder, tensors, config)
    verify_roundtrip(folder, tensors, config)


def write(folder: Path, tensors: dict[str, mx.array], config: dict) -> None:
    """Write an adapter into an existing, empty folder.

    Args:
        tensors: by mlx-lm's names.
        config: mlx-lm's adapter config; its key `model` names the base model, if it is
            known.

    Raises:
        UserError: peft has no adapter for one of the layers.
    """
    leaves = {
        leaf: (name, transposed)
        for name, (leaf, transposed) in peft_importer.LEAVES.items()
    }
    renamed = {}
    for name, value in tensors.items():
        path, _, leaf = name.rpartition(".")
        if leaf not in leaves or value.ndim > 2 or "embed" in path:
            raise UserError(
                f"peft has no adapter like that of {path}",
                hint="remove embeddings and experts from adapter.target_modules, or "
                "peft from formats",
                code=FAILED,
            )
        peft_leaf, transposed = leaves[leaf]
        peft_name = f"{peft_importer.PREFIX}{path}.{peft_leaf}"
        renamed[peft_name] = value.T if transposed else value
    paths = sorted({name.rpartition(".")[0] for name in tensors})
    safetensors_io.write_safetensors(folder / peft_importer.WEIGHTS, renamed)
    text = json.dumps(lora_config(config, paths), indent=2) + "\n"
    (folder / peft_importer.CONFIG).write_text(text)


def lora_config(config: dict, paths: list[str]) -> dict:
    """peft's LoraConfig of mlx-lm's adapter config, for the layers of these paths."""
    lora = config["lora_parameters"]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config["model"],
        "inference_mode": True,
        "r": lora["rank"],
        "lora_alpha": lora["scale"] * lora["rank"],
        "lora_dropout": lora["dropout"],
        "use_dora": config["fine_tune_type"] == "dora",
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": paths,
    }


def verify_roundtrip(folder: Path, expected: dict[str, mx.array], config: dict) -> None:
    """Read a folder as mlx-lm's adapter and compare it.

    Raises:
        UserError: the adapter differs.
    """
    tensors, read_config = peft_importer.read(folder)
    equal = tensors.keys() == expected.keys() and all(
        mx.array_equal(tensors[name], value) for name, value in expected.items()
    )
    lora, read = config["lora_parameters"], read_config["lora_parameters"]
    same_scale = abs(read["scale"] - lora["scale"]) <= 1e-6 * abs(lora["scale"])
    if not (equal and same_scale and read["rank"] == lora["rank"]):
        raise UserError(
            "the adapter differs after reading the export; nothing is published",
            place=str(folder),
            code=FAILED,
        )
