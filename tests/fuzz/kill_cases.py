"""Recipes whose last stage is disturbed: every kind of stage, and every way to run it.

The stages before the last one are run once.
"""

import json
from pathlib import Path

from test_preference_runs import row
from tiny_runs import METRICS_ONLY, TRAIN, Run

GRID = {"bits": 4, "group_size": 32}
LORA = {"type": "lora", "rank": 4, "dropout": 0.2}
STEPS = TRAIN | {"steps": 6, "batch_size": 4, "save_steps": 1, "eval_steps": 3}
CALIBRATION = {
    "dataset": "builtin:stdlib",
    "num_tokens": 512,
    "num_eval_tokens": 256,
    "max_seq_length": 64,
}
QUANTIZE = GRID | {"calibration": CALIBRATION, "rollback_if_worse": True}
DRAFT = {
    "draft_model": {"num_layers": 1},
    "data_generation": {
        "num_prompts": 8,
        "num_eval_prompts": 2,
        "max_tokens": 8,
        "top_k": 16,
    },
    "benchmark": {"num_prompts": 2, "max_tokens": 8},
    "steps": 4,
    "batch_tokens": 256,
    "save_steps": 1,
    "eval_steps": 2,
}
DRAFTER = {key: value for key, value in DRAFT.items() if key != "draft_model"}
DRAFTER |= {"drafter": {"num_layers": 1, "num_draft_tokens": 2}}
ANSWERS = {"exact_match": {"samples": 4}, "max_tokens": 8, "num_samples": 1}
TRAIN_LORA = {"train": STEPS | {"adapter": LORA}}
RTN = {"quantize": GRID}
FROM_SCRATCH = "from scratch"

# Stages by name. The first model is trained, except in the case "from scratch".
CASES = {
    FROM_SCRATCH: [{"train": STEPS}],
    "train": [{"train": STEPS | {"optimizer": "muon", "load_best_at_end": True}}],
    "train lora": [{"train": STEPS | {"adapter": LORA, "sample_prompts": ["Add 1."]}}],
    "train qat": [{"train": STEPS | {"qat": GRID, "compare_full_precision": True}}],
    "train qat lora": [
        {"train": STEPS | {"qat": GRID, "adapter": {"type": "lora", "rank": 4}}}
    ],
    "train from codes": [RTN, {"train": STEPS | {"qat": GRID | {"quantizer": "lsq"}}}],
    "train offline teacher": [
        {"train": STEPS | {"qat": GRID, "teacher": {"offline": True, "top_k": 16}}}
    ],
    "train teacher completions": [
        {
            "train": STEPS
            | {
                "qat": GRID,
                "teacher": {"sequence_level": {"temperatures": [0.5], "max_tokens": 8}},
            }
        }
    ],
    "train dpo": [{"train": STEPS | {"loss": {"type": "dpo"}, "adapter": LORA}}],
    "train packed": [
        {"train": STEPS | {"packing": True, "gradient_accumulation_steps": 2}}
    ],
    "quantize rtn": [{"quantize": QUANTIZE}],
    "quantize gptq": [{"quantize": QUANTIZE | {"method": "gptq"}}],
    "quantize awq": [{"quantize": QUANTIZE | {"method": "awq"}}],
    "quantize mixed precision": [
        {
            "quantize": QUANTIZE
            | {
                "method": "gptq",
                "mixed_precision": {"target_bpw": 5.0, "candidate_bits": [3, 4, 8]},
            }
        }
    ],
    "draft": [{"draft": DRAFT}],
    "draft quantized": [RTN, {"draft": DRAFT | {"quantization": {"bits": 4}}}],
    "draft eagle3": [{"draft": DRAFTER | {"architecture": "eagle3"}}],
    "draft dflash": [RTN, {"draft": DRAFTER | {"architecture": "dflash"}}],
    "evaluate": [RTN, {"evaluate": METRICS_ONLY | ANSWERS | {"num_tokens": 50}}],
    "export mlx": [RTN, {"export": {"formats": ["mlx"]}}],
    "export gguf": [{"train": STEPS}, {"export": {"formats": ["gguf"]}}],
    "export hf": [RTN, {"export": {"formats": ["hf"]}}],
    "export peft": [TRAIN_LORA, {"export": {"formats": ["mlx", "peft"]}}],
}


def make_run(folder: Path, name: str, model: Path) -> Run:
    """The run of a case, in a new folder."""
    folder.mkdir()
    is_new = name == FROM_SCRATCH
    run = Run(folder, *CASES[name], model="" if is_new else model)
    if name == "train dpo":
        for split, start, count in (("train", 0, 24), ("valid", 100, 8)):
            lines = (json.dumps(row(n, "dpo")) for n in range(start, start + count))
            (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    run.data["max_seq_length"] = 128
    run.write()
    return run
