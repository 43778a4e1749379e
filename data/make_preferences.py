"""Write data/preferences/: a question, its answer, and an answer with one mistake.

    python data/make_preferences.py [FOLDER]

Questions and answers are those of data/skills; the mistakes come from a fixed seed.
"""

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
SEED = 20240301
PER_KIND = {"train": 60, "valid": 15}
OPPOSITES = {"yes": "no", "even": "odd"}
OPPOSITES |= {value: key for key, value in OPPOSITES.items()}


def with_mistake(answer: str, r: random.Random) -> str:
    """A wrong answer that looks like the right one."""
    if answer in OPPOSITES:
        return OPPOSITES[answer]
    if answer.lstrip("-").isdigit():
        return str(int(answer) + r.choice([-10, -2, -1, 1, 2, 10]))
    items = answer.split(", ")
    if len(items) > 1:
        place = r.randrange(len(items) - 1)
        items[place : place + 2] = reversed(items[place : place + 2])
        if (swapped := ", ".join(items)) != answer:
            return swapped
    letters = list(answer)
    place = r.randrange(len(letters))
    # A letter twice, or not at all if another one is left.
    letters[place] *= r.choice([0, 2]) if len(letters) > 1 else 2
    return "".join(letters)


def make(split: str) -> list[dict]:
    """Rows with prompt, chosen and rejected, as messages, and skill."""
    r, counts, rows = random.Random(f"{SEED} {split}"), {}, []
    for line in (HERE / "skills" / f"{split}.jsonl").read_text().splitlines():
        example = json.loads(line)
        skill = example["skill"]
        counts[skill] = counts.get(skill, 0) + 1
        if counts[skill] <= PER_KIND[split]:
            prompt, chosen = (turn["content"] for turn in example["messages"])
            rejected = with_mistake(chosen, r)
            turns = {"prompt": ("user", prompt), "chosen": ("assistant", chosen)}
            turns["rejected"] = ("assistant", rejected)
            row = {
                name: [{"role": role, "content": content}]
                for name, (role, content) in turns.items()
            }
            rows.append(row | {"skill": skill})
    return rows


def main(folder: Path) -> None:
    """Write one JSONL file per split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in PER_KIND:
        rows = [json.dumps(row, separators=(",", ":")) + "\n" for row in make(split)]
        path = folder / f"{split}.jsonl"
        path.write_text("".join(rows), encoding="utf-8", newline="\n")
        print(f"{path}: {len(rows):,} examples, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]) if sys.argv[1:] else HERE / "preferences")
