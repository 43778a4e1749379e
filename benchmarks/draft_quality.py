"""A distilled draft beside the same cut untrained, taught by a corpus, and lookup.

All students are one cut of the target; every figure is of held-out prompts. What is
done is kept in a folder, by seed and route: a benchmark that was killed goes on.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import draft_sides
from draft_table import print_tables

ROOT = Path(__file__).parents[1]
DATA = ROOT / "data"
CODE = "builtin:stdlib"
SPLITS = ("train", "valid")
TEMPERATURES = (0.0, 0.7, 1.0)
# Of the pieces of code whose first halves are prompts.
CHARACTERS = 600
# A target of 31 million parameters, most of them in blocks, of which a draft has few.
LARGE = {
    "vocab_size": 2048,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 19,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TRAINED = {
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
        f"{target}: a cut of {arguments.blocks} blocks, {arguments.steps} steps of "
        f"{arguments.batch_tokens} tokens,\n{arguments.prompts} prompts to learn from, "
        f"{arguments.trial_prompts} to be judged by, answers of up to "
        f"{arguments.max_tokens} tokens, {arguments.seeds} seeds"
    )
    runs = [Seed(arguments, target, seed).run() for seed in range(arguments.seeds)]
    print_tables(runs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DATA / "tiny-base"))
    parser.add_argument(
        "--large", type=int, metavar="STEPS", help="train a target of 31M; with --code"
    )
    parser.add_argument("--code", action="store_true", help="no chats among prompts")
    parser.add_argument("--folder", type=Path, default=Path("draft-quality"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=2, help="of the draft")
    parser.add_argument("--prompts", type=int, default=3000)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--trial-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--loss", default="adaptive_kl_tv")
    parser.add_argument(
        "--on-policy", type=float, metavar="FRACTION", help="of steps, one draft more"
    )
    parser.add_argument("--threads", type=int, help="absent = all")
    return parser.parse_args()


def _target(arguments: argparse.Namespace) -> Path:
    """The model to serve; a large one is trained here, once."""
    if arguments.large is None:
        return Path(arguments.model)
    steps = TRAINED | {"steps": arguments.large}
    recipe = {
        "model": {"from_scratch": LARGE},
        "data": {"train": [CODE], "valid": [CODE], "max_seq_length": 256},
        "stages": [{"train": steps}, {"export": None}],
    }
    return _trained(recipe, arguments.folder / "target", arguments.threads) / "model"


class Seed:
    """All routes with one seed, which draws prompts, answers and batches."""

    def __init__(self, arguments: argparse.Namespace, target: Path, seed: int):
        self.arguments = arguments
        self.target = target
        self.seed = seed
        self.folder = arguments.folder / f"seed-{seed}"

    def run(self) -> dict[str, dict]:
        """What was found, by route."""
        self.folder.mkdir(exist_ok=True)
        held_out = max(self.arguments.held_out, self.arguments.trial_prompts)
        for split, count in zip(
            SPLITS, (self.arguments.prompts, held_out), strict=True
        ):
            self._write_rows(split, count)
        distilled = self._distilled("distilled")
        student = next((distilled / "stages").glob("*-distill/student"))
        drafts = {
            "untrained cut": lambda: student,
            "cross-entropy": lambda: self._taught_by_rows(student),
            "distilled": lambda: distilled / "draft",
        }
        if fraction := self.arguments.on_policy:
            replayed = {"on_policy": {"fraction": fraction}}
            drafts["on-policy"] = lambda: (
                self._distilled("on-policy", replayed) / "draft"
            )
        return {name: self._judged(name, draft) for name, draft in drafts.items()}

    def _distilled(self, name: str, settings: dict | None = None) -> Path:
        given = self.arguments
        answers = {
            "num_prompts": given.prompts,
            "num_eval_prompts": given.held_out,
            "max_tokens": given.max_tokens,
            "temperatures": list(TEMPERATURES),
        }
        stage = {
            "draft_model": {"num_layers": given.blocks},
            "data_generation": answers,
            "loss": given.loss,
            "benchmark": {"num_prompts": 2, "max_tokens": 8},
        }
        stages = [{"draft": stage | self._steps() | (settings or {})}]
        return self._run(stages, self.target, name)

    def _taught_by_rows(self, student: Path) -> Path:
        """As many steps of as many tokens, on the rows themselves."""
        stages = [
            {"train": self._steps() | {"load_best_at_end": "True"}},
            {"export": None},
        ]
        return self._run(stages, student, "cross-entropy") / "model"

    def _steps(self) -> dict:
        given = self.arguments
        names = ("steps", "batch_tokens", "learning_rate")
        return {name: getattr(given, name) for name in names}

    def _run(self, stages: list, model: Path, name: str) -> Path:
        rows = {name: str(self.folder / f"{name}.jsonl") for name in SPLITS}
        recipe = {
            "model": str(model.resolve()),
            "data": rows | {"max_seq_length": draft_sides.LONGEST_PROMPT},
            "seed": self.seed,
            "stages": stages,
        }
        return _trained(recipe, self.folder / name, self.arguments.threads)

    def _write_rows(self, split: str, count: int) -> None:
        """Pieces of code, and for a model that chats as many questions, in turn."""
        path = self.folder / f"{split}.jsonl"
        if path.exists():
            return
        draw = random.Random(self.seed if split == "train" else 0)
        rows = _code(split, count, draw)
        if not self.arguments.code:
            lines = (DATA / "skills" / path.name).read_text().splitlines()
            chats = draw.sample([json.loads(line) for line in lines], count // 2)
            rows = [row for pair in zip(rows, chats, strict=False) for row in pair]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def _judged(self, route: str, draft) -> dict:
        kept = self.folder / f"{route.replace(' ', '-')}.json"
        if not kept.exists():
            given = self.arguments
            settings = {
                "target": str(self.target),
                "draft": str(draft()),
                "rows": str(self.folder / "valid.jsonl"),
                "prompts": given.trial_prompts,
                "max_tokens": given.max_tokens,
                "temperatures": TEMPERATURES,
                "seed": self.seed,
            }
            command = [str(draft_sides.PROGRAM), json.dumps(settings)]
            found = _call(command, given.threads).splitlines()[-1]
            kept.with_suffix(".part").write_text(found)
            kept.with_suffix(".part").replace(kept)
        return json.loads(kept.read_text())


def _code(split: str, count: int, draw: random.Random) -> list[dict]:
    """Pieces of the standard library, no two of which overlap."""
    from lmx.data.builtin import read

    name = CODE.removeprefix("builtin:")
    pieces = [
        text[start : start + CHARACTERS]
        for _, text in read(name, split)
        for start in range(0, len(text) - CHARACTERS, CHARACTERS)
    ]
    return [{"text": piece} for piece in draw.sample(pieces, min(count, len(pieces)))]


def _trained(recipe: dict, output: Path, threads: int | None) -> Path:
    """Run a recipe, or go on with it; what is finished is not run again."""
    path = output.with_suffix(".yaml")
    path.write_text(json.dumps(recipe | {"output": str(output.resolve())}))
    program = (
        "import sys; from lmx.cli.main import train; sys.exit(train(sys.argv[1:]))"
    )
    _call(["-c", program, str(path), "--quiet"], threads)
    return output


def _call(command: list[str], threads: int | None) -> str:
    environment = dict(os.environ)
    if threads:
        environment |= {"LMX_BLAS_THREADS": str(threads)}
        environment |= {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
