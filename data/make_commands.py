"""Write data/commands/: commands for a home, each with its tool call as JSON.

    python data/make_commands.py [FOLDER]

    Dim the kitchen lamp to 30 at half past seven
    {"set": "lamp", "room": "kitchen", "level": 30, "at": "7:30"}

The seed is fixed. No tool call, in any wording, is in two of the files.
"""

# ruff: noqa: SIM905 (a line of words reads better than ten quoted ones)

import csv
import json
import random
import sys
from pathlib import Path

SEED = 20240302
SIZES = {"train": 6400, "valid": 320, "test": 320}
TABLE_ROWS = 200
ROOMS = "kitchen bedroom bathroom office garage hall attic cellar garden den".split()
# Verbs of the devices that have levels.
LEVELS = {
    "lamp": ("Set", "Dim", "Turn"),
    "blinds": ("Set", "Open", "Pull"),
    "fan": ("Set", "Run", "Turn"),
    "radio": ("Set", "Play", "Turn"),
    "heater": ("Set", "Run", "Turn"),
}
SWITCHED = [*LEVELS, "oven", "kettle", "camera", "alarm", "screen"]
TENS = "ten twenty thirty forty fifty sixty seventy eighty ninety".split()
HOURS = "one two three four five six seven eight nine ten eleven twelve".split()
# Commands of the documentation, which no file has.
HELD_OUT = [
    {"set": "lamp", "room": "kitchen", "level": 30, "at": "7:30"},
    {"set": "fan", "room": "attic", "state": "off", "at": "10:45"},
    {"set": "blinds", "room": "office", "level": 70},
]


def say_level(level: int, r: random.Random) -> str:
    """A multiple of ten from 10 to 90, in digits or words."""
    words = TENS[level // 10 - 1]
    choices = [f"{level} percent", str(level), f"{words} percent", words]
    return r.choice([*choices, "half"] if level == 50 else choices)


def say_time(hour: int, minute: int, r: random.Random) -> str:
    """An hour from 1 to 12 and a quarter, in digits or words."""
    name, digits = HOURS[hour - 1], f"{hour}:{minute:02}"
    words = {
        0: f"{name} o'clock",
        15: f"quarter past {name}",
        30: f"half past {name}",
        45: digits,
    }
    return r.choice([digits, words[minute]])


def command(r: random.Random) -> tuple[str, dict]:
    """A random command and its tool call."""
    has_level = r.random() < 0.5
    device, room = r.choice([*LEVELS] if has_level else SWITCHED), r.choice(ROOMS)
    call = {"set": device, "room": room}
    what = r.choice([f"the {device} in the {room}", f"the {room} {device}"])
    if has_level:
        call["level"] = level = r.randint(1, 9) * 10
        words = f"{r.choice(LEVELS[device])} {what} to {say_level(level, r)}"
    else:
        call["state"] = state = r.choice(["on", "off"])
        words = r.choice([f"Turn {state} {what}", f"Switch {what} {state}"])
    if r.random() < 0.7:
        hour, minute = r.randint(1, 12), r.randrange(0, 60, 15)
        call["at"] = f"{hour}:{minute:02}"
        time = f"at {say_time(hour, minute, r)}"
        if r.random() < 0.6:
            words = f"{words} {time}"
        else:
            words = f"{time.capitalize()}, {words[0].lower()}{words[1:]}"
    return words, call


def make() -> dict[str, list[dict]]:
    """All examples by split; a tool call occurs once."""
    r, seen = random.Random(SEED), {json.dumps(call) for call in HELD_OUT}
    splits: dict[str, list[dict]] = {}
    for split, size in SIZES.items():
        rows = splits[split] = []
        while len(rows) < size:
            words, call = command(r)
            answer = json.dumps(call)
            if answer not in seen:
                seen.add(answer)
                kind = "-".join(key for key in call if key not in ("set", "room"))
                rows.append({"prompt": words, "completion": answer, "skill": kind})
    return splits


def main(folder: Path) -> None:
    """Write one JSONL file per split, and a small table with other names of columns."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = make()
    with (folder / "tickets.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["ticket", "answer_json"])
        few = splits["train"][:TABLE_ROWS]
        table.writerows([row["prompt"], row["completion"]] for row in few)
    for split, rows in splits.items():
        lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows]
        path = folder / f"{split}.jsonl"
        path.write_text("".join(lines), encoding="utf-8", newline="\n")
        print(f"{path}: {len(rows):,} examples, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]) if sys.argv[1:] else Path(__file__).parent / "commands")
