"""Compare a draft model with EAGLE-3 and DFlash drafters, and with prompt lookup.

All are trained on the same completions of the target, for the same number of steps and
tokens. Drafters are also trained on the hidden states of the unquantized model, and
then draft for the quantized one that is served. Held-out prompts: chats, text and code.
Runs are kept in a folder, so the same command resumes; `--print-only` runs nothing.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import drafters_runner
from draft_quality import code_examples, questions
from drafters_table import print_tables
from programs import DATA, call, run_recipe

ARCHITECTURES = ("model", "eagle3", "dflash")
SETS = ("chat", "text", "code")
CHARACTERS = 600
# Examples have more tokens, so that there are enough of them for `--text-tokens`.
TOKENS_PER_EXAMPLE = 100
NUM_EVAL_PROMPTS, NUM_EVALUATIONS = 48, 8


def main() -> None:
    arguments = _arguments()
    results = [_Seed(arguments, seed).run() for seed in arguments.seeds]
    print(
        f"{arguments.num_prompts} prompts, completions of up to {arguments.max_tokens} "
        f"tokens, {arguments.steps} steps of {arguments.batch_tokens} tokens; "
        f"{arguments.num_draft_tokens} draft tokens per round; "
        f"{len(arguments.seeds)} seeds"
    )
    print_tables(results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", default=str(DATA / "tiny-base"))
    parser.add_argument("--bits", type=int, default=4, help="of the served target")
    parser.add_argument("--targets", nargs="+", default=["16-bit", "quantized"])
    parser.add_argument("--architectures", nargs="+", default=ARCHITECTURES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--gsm8k", type=Path, help="folder with train.jsonl and test.jsonl: the chats"
    )
    parser.add_argument("--text", type=Path, help="a text file; default: no text set")
    parser.add_argument("--num-layers", type=int, default=2, help="of the draft model")
    parser.add_argument("--num-prompts", type=int, default=1500)
    parser.add_argument(
        "--text-tokens", type=int, default=0, help="trained before the completions"
    )
    parser.add_argument("--num-test-prompts", type=int, default=16, help="of every set")
    parser.add_argument("--max-tokens", type=int, default=48, help="per completion")
    parser.add_argument(
        "--max-train-tokens", type=int, help="the same in training data"
    )
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--draft-vocab-size", type=int, help="eagle3")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--print-only", action="store_true")
    return parser.parse_args()


class _Seed:
    """All drafts of one seed, for both targets."""

    def __init__(self, arguments: argparse.Namespace, seed: int):
        self.arguments = arguments
        self.seed = seed
        self.folder = arguments.folder / f"seed-{seed}"
        self.sets = [name for name in SETS if self._source(name)]

    def run(self) -> dict[str, dict]:
        """The results by served target; see `drafters_runner`."""
        arguments = self.arguments
        if not arguments.print_only:
            self._write_examples()
            for target in arguments.targets:
                for architecture in arguments.architectures:
                    self._distill(target, architecture)
        return {target: self._benchmark(target) for target in arguments.targets}

    def _write_examples(self) -> None:
        """Examples by set, for training, validation and tests.

        A file has examples of one format.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        rng = random.Random(self.seed)
        sources = {name: self._source(name) for name in self.sets}
        arguments = self.arguments
        texts = arguments.text_tokens // TOKENS_PER_EXAMPLE
        share = max(arguments.num_prompts, texts) // len(sources)
        for name, read in sources.items():
            _write(self.folder / f"train-{name}.jsonl", read("train", share, rng))
        held_out = random.Random(0)
        for name, read in sources.items():
            tests = read("valid", arguments.num_test_prompts, held_out)
            _write(self.folder / f"{name}.jsonl", tests)
            others = read("valid", NUM_EVAL_PROMPTS, rng)
            others = [row for row in others if row not in tests]
            _write(self.folder / f"valid-{name}.jsonl", others)

    def _source(self, name: str):
        """A function of split, count and random numbers that returns examples."""
        arguments = self.arguments
        if name == "code":
            return code_examples
        if name == "text":
            return arguments.text and (
                lambda split, count, rng: _text_examples(
                    arguments.text, split, count, rng
                )
            )
        if arguments.gsm8k:
            return lambda *options: questions(arguments.gsm8k, *options)
        return _skills

    def _distill(self, target: str, architecture: str) -> None:
        arguments = self.arguments
        stage = {
            "architecture": architecture,
            "data_generation": {
                "num_prompts": arguments.num_prompts,
                "num_eval_prompts": NUM_EVAL_PROMPTS,
                "max_tokens": arguments.max_train_tokens or arguments.max_tokens,
                "text_tokens": arguments.text_tokens,
            },
            "steps": arguments.steps,
            "batch_tokens": arguments.batch_tokens,
            "learning_rate": arguments.learning_rate,
            "eval_steps": max(1, arguments.steps // NUM_EVALUATIONS),
            # These completions choose the best weights, too.
            "benchmark": {"num_prompts": 8, "max_tokens": 32},
        }
        if architecture == "model":
            stage["draft_model"] = {"num_layers": arguments.num_layers}
        else:
            stage["drafter"] = {"num_draft_tokens": arguments.num_draft_tokens}
            if architecture == "eagle3" and arguments.draft_vocab_size:
                stage["drafter"]["draft_vocab_size"] = arguments.draft_vocab_size
        self._run(self._target(target), [{"draft": stage}], f"{target}-{architecture}")

    def _target(self, name: str) -> Path:
        if name == "16-bit":
            return Path(self.arguments.model)
        grid = {"bits": self.arguments.bits, "group_size": 64}
        stages = [{"quantize": {"method": "gptq", "effort": "fast"} | grid}]
        return self._run(Path(self.arguments.model), stages, "quantized") / "model"

    def _run(self, model: Path, stages: list, name: str) -> Path:
        recipe = {
            "model": str(model.resolve()),
            "data": {
                "train": [
                    str(self.folder / f"train-{name}.jsonl") for name in self.sets
                ],
                "valid": [
                    str(self.folder / f"valid-{name}.jsonl") for name in self.sets
                ],
                "max_seq_length": drafters_runner.MAX_PROMPT_LENGTH,
            },
            "seed": self.seed,
            "stages": [*stages, {"export": None}],
        }
        print(f"seed {self.seed}: {name}", file=sys.stderr, flush=True)
        return run_recipe(recipe, self.folder / name, self.arguments.threads)

    def _benchmark(self, target: str) -> dict:
        file = self.folder / f"{target}.json"
        if file.exists() or self.arguments.print_only:
            return json.loads(file.read_text())
        arguments = self.arguments
        trained_on = dict.fromkeys([target, "16-bit"])
        drafts = {
            f"{architecture}, {source}": str(
                (self.folder / f"{source}-{architecture}" / "draft").resolve()
            )
            for source in trained_on
            if source in arguments.targets
            for architecture in arguments.architectures
        }
        settings = {
            "target": str(self._target(target).resolve()),
            "drafts": drafts,
            "prompts": {
                path.stem: str(path)
                for path in sorted(self.folder.glob("*.jsonl"))
                if path.stem in SETS
            },
            "num_prompts": arguments.num_test_prompts,
            "max_tokens": arguments.max_tokens,
            "num_draft_tokens": arguments.num_draft_tokens,
            "temperatures": [0.0, 0.7],
            "seed": self.seed,
        }
        command = [str(drafters_runner.PROGRAM), json.dumps(settings)]
        result = call(command, arguments.threads).splitlines()[-1]
        file.write_text(result)
        return json.loads(result)


def _skills(split: str, count: int, rng: random.Random) -> list[dict]:
    lines = (DATA / "skills" / f"{split}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in rng.sample(lines, min(count, len(lines)))]


def _text_examples(
    path: Path, split: str, count: int, rng: random.Random
) -> list[dict]:
    """Parts of a text; the last tenth is held out."""
    text = path.read_text()
    end = len(text) * 9 // 10
    text = text[:end] if split == "train" else text[end:]
    starts = range(0, len(text) - CHARACTERS, CHARACTERS)
    return [
        {"text": text[start : start + CHARACTERS]}
        for start in rng.sample(starts, min(count, len(starts)))
    ]


def _write(path: Path, rows: list[dict]) -> None:
    if not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
