"""Compare a distilled draft model with baselines and with prompt lookup.

All drafts are the same pruned copy of the target: untrained, trained on the corpus, or
distilled. All results are of held-out prompts. Runs are kept in a folder by seed and
draft, so the same command resumes.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import draft_runner
from draft_table import print_tables

sys.path.append(str(Path(__file__).parents[1]))
import gsm8k
from programs import DATA, call, run_recipe

CODE_DATASET = "builtin:stdlib"
SPLITS = ("train", "valid")
TEMPERATURES = (0.0, 0.7, 1.0)
# Length of the code examples; their first halves are prompts.
CHARACTERS = 600
# A target of 31 million parameters, most of them in blocks; a draft keeps few blocks.
LARGE_TARGET = {
    "vocab_size": 2048,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 19,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TARGET_TRAINING = {
    "batch_tokens": 1024,
    "learning_rate": 1.5e-3,
    "weight_decay": 0.1,
    "eval_steps": 100,
    "save_steps": 50,
}


def main() -> None:
    arguments = _arguments()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    target = _target(arguments)
    print(
        f"{target}: drafts of {arguments.num_layers} blocks, {arguments.steps} steps "
        f"of {arguments.batch_tokens} tokens,\n{arguments.num_prompts} training and "
        f"{arguments.num_test_prompts} test prompts, completions of up to "
        f"{arguments.max_tokens} tokens, {arguments.seeds} seeds"
    )
    runs = [Seed(arguments, target, seed).run() for seed in range(arguments.seeds)]
    print_tables(runs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DATA / "tiny-base"))
    parser.add_argument(
        "--large",
        type=int,
        metavar="STEPS",
        help="first train a target of 31M parameters",
    )
    parser.add_argument("--code-only", action="store_true", help="no chat prompts")
    parser.add_argument(
        "--gsm8k",
        type=Path,
        help="folder with train.jsonl and test.jsonl: only their questions are prompts",
    )
    parser.add_argument("--folder", type=Path, default=Path("draft-quality"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-layers", type=int, default=2, help="of the draft")
    parser.add_argument("--num-prompts", type=int, default=3000)
    parser.add_argument("--num-eval-prompts", type=int, default=64)
    parser.add_argument("--num-test-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64, help="per completion")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, help="default: all cores")
    return parser.parse_args()


def _target(arguments: argparse.Namespace) -> Path:
    """The target model; --large trains it once."""
    if arguments.large is None:
        return Path(arguments.model)
    training = TARGET_TRAINING | {"steps": arguments.large}
    recipe = {
        "model": {"from_scratch": LARGE_TARGET},
        "data": {
            "train": [CODE_DATASET],
            "valid": [CODE_DATASET],
            "max_seq_length": 256,
        },
        "stages": [{"train": training}, {"export": None}],
    }
    return run_recipe(recipe, arguments.folder / "target", arguments.threads) / "model"


class Seed:
    """All drafts of one seed. The seed selects prompts, completions and batches."""

    def __init__(self, arguments: argparse.Namespace, target: Path, seed: int):
        self.arguments = arguments
        self.target = target
        self.seed = seed
        self.folder = arguments.folder / f"seed-{seed}"

    def run(self) -> dict[str, dict]:
        """The results by draft."""
        self.folder.mkdir(exist_ok=True)
        arguments = self.arguments
        num_valid = max(arguments.num_eval_prompts, arguments.num_test_prompts)
        self._write_examples("train", arguments.num_prompts)
        self._write_examples("valid", num_valid)
        distilled = self._distill()
        initial = "*-draft/artifacts/models/initial/content"
        untrained = next((distilled / "stages").glob(initial))
        drafts = {
            "untrained": lambda: untrained,
            "cross-entropy": lambda: self._train_on_corpus(untrained),
            "distilled": lambda: distilled / "draft",
        }
        return {name: self._benchmark(name, draft) for name, draft in drafts.items()}

    def _distill(self) -> Path:
        arguments = self.arguments
        data_generation = {
            "num_prompts": arguments.num_prompts,
            "num_eval_prompts": arguments.num_eval_prompts,
            "max_tokens": arguments.max_tokens,
            "temperatures": list(TEMPERATURES),
        }
        stage = {
            "draft_model": {"num_layers": arguments.num_layers},
            "data_generation": data_generation,
            "benchmark": {"num_prompts": 2, "max_tokens": 8},
        }
        return self._run([{"draft": stage | self._steps()}], self.target, "distilled")

    def _train_on_corpus(self, draft: Path) -> Path:
        """As many steps and tokens, with cross-entropy on the examples."""
        stages = [
            {"train": self._steps() | {"load_best_at_end": True}},
            {"export": None},
        ]
        return self._run(stages, draft, "cross-entropy") / "model"

    def _steps(self) -> dict:
        arguments = self.arguments
        names = ("steps", "batch_tokens", "learning_rate")
        return {name: getattr(arguments, name) for name in names}

    def _run(self, stages: list, model: Path, name: str) -> Path:
        data = {split: str(self.folder / f"{split}.jsonl") for split in SPLITS}
        recipe = {
            "model": str(model.resolve()),
            "data": data | {"max_seq_length": draft_runner.MAX_PROMPT_LENGTH},
            "seed": self.seed,
            "stages": stages,
        }
        return run_recipe(recipe, self.folder / name, self.arguments.threads)

    def _write_examples(self, split: str, count: int) -> None:
        """Write code examples and as many chats, code only, or GSM8K only."""
        path = self.folder / f"{split}.jsonl"
        if path.exists():
            return
        rng = random.Random(self.seed if split == "train" else 0)
        if folder := self.arguments.gsm8k:
            examples = questions(folder, split, count, rng)
        else:
            examples = code_examples(split, count, rng)
        if not (folder or self.arguments.code_only):
            lines = (DATA / "skills" / path.name).read_text().splitlines()
            chats = rng.sample([json.loads(line) for line in lines], count // 2)
            pairs = zip(examples, chats, strict=False)
            examples = [example for pair in pairs for example in pair]
        path.write_text("".join(json.dumps(e) + "\n" for e in examples))

    def _benchmark(self, name: str, draft) -> dict:
        file = self.folder / f"{name}.json"
        if not file.exists():
            arguments = self.arguments
            settings = {
                "target": str(self.target),
                "draft": str(draft()),
                "data": str(self.folder / "valid.jsonl"),
                "num_prompts": arguments.num_test_prompts,
                "max_tokens": arguments.max_tokens,
                "temperatures": TEMPERATURES,
                "seed": self.seed,
            }
            command = [str(draft_runner.PROGRAM), json.dumps(settings)]
            result = call(command, arguments.threads).splitlines()[-1]
            file.with_suffix(".part").write_text(result)
            file.with_suffix(".part").replace(file)
        return json.loads(file.read_text())


def code_examples(split: str, count: int, rng: random.Random) -> list[dict]:
    """Parts of the standard library that do not overlap."""
    from lmx.data.builtin import read

    name = CODE_DATASET.removeprefix("builtin:")
    parts = [
        text[start : start + CHARACTERS]
        for _, text in read(name, split)
        for start in range(0, len(text) - CHARACTERS, CHARACTERS)
    ]
    return [{"text": part} for part in rng.sample(parts, min(count, len(parts)))]


def questions(folder: Path, split: str, count: int, rng: random.Random) -> list[dict]:
    """Questions and answers of GSM8K as chats."""
    file = folder / ("train.jsonl" if split == "train" else "test.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [gsm8k.chat(row) for row in rng.sample(rows, min(count, len(rows)))]


if __name__ == "__main__":
    main()
