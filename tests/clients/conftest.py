"""The exports of one run and its base model."""

import json

import pytest
import yaml
from lmx.cli import main

STAGES = [
    {
        "train": {
            "adapter": {
                "type": "dora",
                "rank": 4,
                "target_modules": {"mlp.*": 2, "*": 4},
            },
            "steps": 3,
            "batch_size": 4,
            "learning_rate": 0.05,
        }
    },
    {"quantize": {"bits": 4, "group_size": 32}},
    {"export": {"formats": ["mlx", "hf", "peft", "gguf"]}},
]


@pytest.fixture(scope="session")
def base(make_checkpoint):
    return make_checkpoint(num_hidden_layers=2, num_key_value_heads=1)


@pytest.fixture(scope="session")
def run(tmp_path_factory, base):
    """A run folder: a DoRA adapter, fused, quantized to 4 bits, in every format."""
    folder = tmp_path_factory.mktemp("clients")
    examples = [{"prompt": f"Count to {n}.", "completion": "1 2 3"} for n in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, examples)))
    data = {"train": str(folder / "rows.jsonl"), "max_seq_length": 64}
    recipe = {"model": str(base), "data": data, "stages": STAGES}
    (folder / "all.yaml").write_text(yaml.safe_dump(recipe))
    output = folder / "out"
    assert main.train([str(folder / "all.yaml"), f"output={output}", "--quiet"]) == 0
    return output
