"""A model for estimates: its shapes, a checkpoint of it, and data."""

import json
from pathlib import Path

from lmx.config.model import ScratchModelConfig
from lmx.models import checkpoint_writer, from_scratch
from lmx.pipeline.estimate import ModelShape

SHAPE = ScratchModelConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    max_position_embeddings=1000,
)


def sized(shape: ScratchModelConfig = SHAPE, **changes) -> ModelShape:
    """A model of 16-bit weights."""
    config = from_scratch.llama_config(shape.model_copy(update=changes))
    return ModelShape.of_config(config | {"torch_dtype": "float16"})


def write_sized(folder: Path, shape: ScratchModelConfig = SHAPE) -> Path:
    """A checkpoint of this shape, in `folder`."""
    model, tokenizer = folder / "tiny", folder / "tokenizer"
    for path in (model, tokenizer):
        path.mkdir()
    from_scratch.train_tokenizer(["count to three, one two three"] * 3, 320, tokenizer)
    config = from_scratch.llama_config(shape)
    weights = from_scratch.initial_weights(config, 0)
    checkpoint_writer.write_checkpoint(model, weights, config, companions=tokenizer)
    return model


def write_rows(rows: list[dict]) -> None:
    """The data of the recipes, in the working directory."""
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
