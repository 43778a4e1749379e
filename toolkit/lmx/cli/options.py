"""Options that stand for a recipe: `lmx train`, `lmx quantize` and `lmx draft`."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import UserError

# Of training without --batch-size, --steps and --epochs.
BATCH_TOKENS, EPOCHS = 2048, 1


@dataclass(frozen=True)
class RecipeOption:
    """An option that sets one value of a recipe.

    Attributes:
        path: keys of the value; the first is `stage`, or a key of the recipe.
        is_text: take the value as it is, not as YAML.
    """

    flag: str
    path: tuple[str, ...]
    about: str
    is_text: bool = False

    @property
    def name(self) -> str:
        """The attribute of the parsed arguments."""
        return self.flag.strip("-").replace("-", "_")


MODEL = RecipeOption("--model", ("model",), "folder, Hub id or GGUF file", True)
SEED = RecipeOption("--seed", ("seed",), "random seed")
LENGTH = RecipeOption(
    "--max-seq-length", ("data", "max_seq_length"), "tokens per sequence"
)
STEPS = RecipeOption("--steps", ("stage", "steps"), "optimizer steps")
RATE = RecipeOption("--learning-rate", ("stage", "learning_rate"), "peak learning rate")
BATCH = RecipeOption("--batch-tokens", ("stage", "batch_tokens"), "tokens per batch")


def _data(about: str) -> RecipeOption:
    return RecipeOption("--data", ("data", "train"), about, True)


# By kind of stage.
OPTIONS: dict[str, list[RecipeOption]] = {
    "train": [
        MODEL,
        _data("training data: file, folder or Hub id"),
        RecipeOption("--valid", ("data", "valid"), "validation data", True),
        RecipeOption(
            "--lora-rank",
            ("stage", "adapter", "rank"),
            "train a LoRA adapter of this rank and merge it",
        ),
        RecipeOption("--bits", ("stage", "qat", "bits"), "QAT: bits of the new model"),
        STEPS,
        RecipeOption("--epochs", ("stage", "epochs"), "passes over the data"),
        RecipeOption("--batch-size", ("stage", "batch_size"), "examples per batch"),
        BATCH,
        RATE,
        LENGTH,
        SEED,
    ],
    "quantize": [
        MODEL,
        _data("calibration data: file, folder or Hub id; default: built-in text"),
        RecipeOption("--method", ("stage", "method"), "rtn or gptq"),
        RecipeOption("--bits", ("stage", "bits"), "bits per weight"),
        RecipeOption("--group-size", ("stage", "group_size"), "weights per scale"),
        SEED,
    ],
    "draft": [
        MODEL,
        _data("prompts like those that the model will get"),
        RecipeOption("--valid", ("data", "valid"), "validation data", True),
        RecipeOption(
            "--architecture", ("stage", "architecture"), "model, eagle3 or dflash"
        ),
        RecipeOption(
            "--num-layers", ("stage", "draft_model", "num_layers"), "blocks to keep"
        ),
        RecipeOption(
            "--bits", ("stage", "quantization", "bits"), "bits of the draft model"
        ),
        STEPS,
        BATCH,
        RATE,
        LENGTH,
        SEED,
    ],
}
# The stages after the first one.
NEXT: dict[str, list[dict[str, Any]]] = {
    "train": [{"export": {}}],
    "quantize": [{"export": {}}],
    "draft": [],
}


def add_recipe_options(parser: argparse.ArgumentParser, kind: str) -> None:
    """Declare the options of a kind of stage."""
    group = parser.add_argument_group("options instead of a recipe")
    for option in OPTIONS[kind]:
        group.add_argument(option.flag, help=option.about)


def given_options(arguments: argparse.Namespace, kind: str) -> list[str]:
    """The options that stand for a recipe, as far as they are given."""
    return [option.flag for option, _ in _given(arguments, kind)]


def recipe_of(arguments: argparse.Namespace, kind: str) -> dict[str, Any]:
    """The recipe that the options stand for, as plain data.

    Raises:
        UserError: --model or --data is missing.
    """
    needed = ["--model"] if kind == "quantize" else ["--model", "--data"]
    flags = given_options(arguments, kind)
    if missing := [flag for flag in needed if flag not in flags]:
        raise UserError(
            f"{missing[0]} is missing", hint=f"see lmx {kind} --help; or give a recipe"
        )
    stage: dict[str, Any] = {}
    data: dict[str, Any] = {"model": None, "data": {}, "seed": 0}
    for option, value in _given(arguments, kind):
        first, *steps = option.path
        block = stage if first == "stage" else data
        *above, last = steps if first == "stage" else option.path
        for step in above:
            block = block.setdefault(step, {})
        block[last] = value
    if kind == "train":
        if not {"steps", "epochs"} & {*stage}:
            stage["epochs"] = EPOCHS
        if not {"batch_size", "batch_tokens"} & {*stage}:
            stage["batch_tokens"] = BATCH_TOKENS
    return {**data, "stages": [{kind: stage}, *NEXT[kind]]}


def _given(
    arguments: argparse.Namespace, kind: str
) -> Iterator[tuple[RecipeOption, Any]]:
    for option in OPTIONS[kind]:
        text = getattr(arguments, option.name)
        if text is not None:
            yield option, text if option.is_text else _value(option, text)


def _value(option: RecipeOption, text: str) -> Any:
    # Loads PyYAML, which `--help` does not need.
    from ..config.yaml_io import read

    document = read(text)
    if document.errors:
        raise UserError(f"{option.flag}: {document.errors[0].message}")
    return document.data
