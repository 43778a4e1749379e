"""Options that stand for a recipe: `lmx train`, `lmx quantize` and `lmx draft`."""

import argparse
from typing import Any

from ..errors import UserError

# Of training without --batch-size, --steps and --epochs.
DEFAULTS = {("steps", "epochs"): 1, ("batch_size", "batch_tokens"): 2048}
# Options whose value is text, not YAML.
TEXTS = ("--model", "--data", "--valid")
SEED = {"--seed": ("seed", "random seed")}
MODEL = {"--model": ("model", "folder, Hub id or GGUF file")}
VALID = {"--valid": ("data.valid", "validation data")}
# By kind of stage; by flag, the address of the value in the recipe and its meaning.
OPTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "train": {
        **MODEL,
        "--data": ("data.train", "training data: file, folder or Hub id"),
        **VALID,
        "--lora-rank": (
            "stages.train.adapter.rank",
            "train a LoRA adapter of this rank and merge it",
        ),
        "--bits": ("stages.train.qat.bits", "QAT: bits of the new model"),
        "--steps": ("stages.train.steps", "optimizer steps"),
        "--epochs": ("stages.train.epochs", "passes over the data"),
        "--batch-size": ("stages.train.batch_size", "examples per batch"),
        "--batch-tokens": ("stages.train.batch_tokens", "tokens per batch"),
        "--learning-rate": ("stages.train.learning_rate", "peak learning rate"),
        "--max-seq-length": ("data.max_seq_length", "tokens per sequence"),
        **SEED,
    },
    "quantize": {
        **MODEL,
        "--data": (
            "data.train",
            "calibration data: file, folder or Hub id; default: built-in text",
        ),
        "--method": ("stages.quantize.method", "rtn or gptq"),
        "--bits": ("stages.quantize.bits", "bits per weight"),
        "--group-size": ("stages.quantize.group_size", "weights per scale"),
        **SEED,
    },
    "draft": {
        **MODEL,
        "--data": ("data.train", "prompts like those that the model will get"),
        **VALID,
        "--architecture": ("stages.draft.architecture", "model, eagle3 or dflash"),
        "--num-layers": ("stages.draft.draft_model.num_layers", "blocks to keep"),
        "--bits": ("stages.draft.quantization.bits", "bits of the draft model"),
        "--steps": ("stages.draft.steps", "optimizer steps"),
        "--batch-tokens": ("stages.draft.batch_tokens", "tokens per batch"),
        "--learning-rate": ("stages.draft.learning_rate", "peak learning rate"),
        "--max-seq-length": ("data.max_seq_length", "tokens per sequence"),
        **SEED,
    },
}


def add_recipe_options(parser: argparse.ArgumentParser, kind: str) -> None:
    """Declare the options of a kind of stage."""
    group = parser.add_argument_group("options instead of a recipe")
    for flag, (_, about) in OPTIONS[kind].items():
        group.add_argument(flag, help=about)


def given_options(arguments: argparse.Namespace, kind: str) -> dict[str, str]:
    """The values of the options that stand for a recipe, as far as they are given."""
    values = vars(arguments)
    given = {flag: values[flag[2:].replace("-", "_")] for flag in OPTIONS[kind]}
    return {flag: value for flag, value in given.items() if value is not None}


def recipe_of(arguments: argparse.Namespace, kind: str) -> dict[str, Any]:
    """The recipe that the options stand for, as plain data.

    Raises:
        UserError: --model or --data is missing.
    """
    # Loads PyYAML, which `--help` does not need.
    from ..config.overrides import merge

    needed = ["--model"] if kind == "quantize" else ["--model", "--data"]
    given = given_options(arguments, kind)
    if missing := [flag for flag in needed if flag not in given]:
        raise UserError(
            f"{missing[0]} is missing", hint=f"see lmx {kind} --help; or give a recipe"
        )
    stage: dict[str, Any] = {}
    stages = [{kind: stage}] if kind == "draft" else [{kind: stage}, {"export": {}}]
    data = {"model": None, "data": {}, "seed": 0, "stages": stages}
    values = {flag: _value(flag, text) for flag, text in given.items()}
    merge(data, [(OPTIONS[kind][flag][0], value) for flag, value in values.items()])
    for keys, value in DEFAULTS.items() if kind == "train" else ():
        if not stage.keys() & {*keys}:
            stage[keys[-1]] = value
    return data


def _value(flag: str, text: str) -> Any:
    from ..config.yaml_io import read

    if flag in TEXTS:
        return text
    document = read(text)
    if document.errors:
        raise UserError(f"{flag}: {document.errors[0].message}")
    return document.data
