"""Write data/commands/: commands for a home, each with its tool call as JSON.

    python data/make_commands.py [FOLDER]

    Could you dim the kitchen lamp to 30 at half past seven?
    {"set": "lamp", "room": "kitchen", "level": 30, "at": "7:30"}

The seed is fixed. No tool call, in any wording, is in two of the files. Half of the
commands of `valid` and `test` have a sentence that no training example has: their
`skill` is "new wording".
"""

# ruff: noqa: SIM905 (a line of words reads better than ten quoted ones)

import csv
import json
import random
import sys
from pathlib import Path
from zlib import crc32

SEED = 20240302
SIZES = {"train": 6400, "valid": 320, "test": 320}
TABLE_ROWS = 200
ROOMS = "kitchen bedroom bathroom office garage hall attic cellar garden den".split()
# Verbs of the devices that have levels.
LEVELS = {
    "lamp": ("set", "dim", "turn"),
    "blinds": ("set", "open", "pull"),
    "fan": ("set", "run", "turn"),
    "radio": ("set", "play", "turn"),
    "heater": ("set", "run", "turn"),
}
SWITCHED = [*LEVELS, "oven", "kettle", "camera", "alarm", "screen"]
PLACES = (
    "the {device} in the {room}",
    "the {room} {device}",
    "the {room}'s {device}",
    "{room} {device}",
    "{device} in {room}",
)
# Sentences by what they set. Those that begin with a verb are put into requests.
IMPERATIVES = {
    "state": (
        "turn {state} {place}",
        "turn {place} {state}",
        "switch {state} {place}",
        "switch {place} {state}",
        "put {place} {state}",
        "get {place} {state}",
        "{start} {place}",
        "make {place} {run}",
    ),
    "level": (
        "{verb} {place} to {level}",
        "set {place} at {level}",
        "turn {place} {up} to {level}",
        "bring {place} to {level}",
        "change {place} to {level}",
        "put {place} at {level}",
        "make {place} run at {level}",
    ),
}
STATEMENTS = {
    "state": (
        "{place} {state}",
        "{state} with {place}",
        "I want {place} {state}",
        "{place} should be {state}",
    ),
    "level": (
        "{place} to {level}",
        "{place} at {level}",
        "I want {place} at {level}",
        "{place} should be at {level}",
    ),
}
REQUESTS = (
    "{0}",
    "please {0}",
    "{0}, please",
    "{0}, thanks",
    "hey, {0}",
    "could you {0}?",
    "can you {0}?",
    "could you please {0}?",
    "would you {0}?",
    "I want you to {0}",
)
REMARKS = ("{0}", "{0}, please", "{0} please", "hey, {0}", "{0}, thanks")
# Of valid and test only.
NEW_IMPERATIVES = {
    "state": ("flip {place} {state}", "have {place} {state}", "keep {place} {state}"),
    "level": (
        "move {place} to {level}",
        "adjust {place} to {level}",
        "keep {place} at {level}",
    ),
}
NEW_STATEMENTS = {
    "state": ("I need {place} {state}", "let {place} be {state}"),
    "level": ("I need {place} at {level}", "let {place} be at {level}"),
}
NEW_REQUESTS = ("will you {0}?", "ok, {0}", "{0} for me", "I need you to {0}")
TENS = "ten twenty thirty forty fifty sixty seventy eighty ninety".split()
HOURS = "one two three four five six seven eight nine ten eleven twelve".split()
QUARTERS = {15: "fifteen", 30: "thirty", 45: "forty-five"}
# Commands of the documentation, which no file has.
HELD_OUT = [
    {"set": "lamp", "room": "kitchen", "level": 30, "at": "7:30"},
    {"set": "fan", "room": "attic", "state": "off", "at": "10:45"},
    {"set": "blinds", "room": "office", "level": 70},
]


def say_level(level: int, r: random.Random) -> str:
    """A multiple of ten from 10 to 90, in digits or words."""
    words = TENS[level // 10 - 1]
    choices = [f"{level} percent", str(level), f"{level}%", f"{words} percent", words]
    return r.choice([*choices, "half"] if level == 50 else choices)


def say_time(hour: int, minute: int, r: random.Random) -> str:
    """An hour from 1 to 12 and a quarter, in digits or words."""
    name = HOURS[hour - 1]
    digits = [f"{hour}:{minute:02}", f"{hour}.{minute:02}"]
    words = {
        0: [f"{name} o'clock", name],
        15: [f"quarter past {name}", f"a quarter past {name}"],
        30: [f"half past {name}"],
        45: [],
    }[minute]
    words += [f"{name} {QUARTERS[minute]}"] if minute else []
    return r.choice([r.choice(digits), r.choice(words)])


def say_case(words: str, r: random.Random) -> str:
    """As people type: with and without capitals and a mark at the end."""
    if not words.endswith("?"):
        words += r.choice(["", "", "", ".", "!"])
    elif r.random() < 0.2:
        words = words[:-1]
    if len(words.split()) <= 8 and r.random() < 0.25:
        return words.upper()  # who shouts is short
    return words.lower() if r.random() < 0.3 else words[0].upper() + words[1:]


def sentence(kind: str, time: str, r: random.Random, *, is_new: bool) -> str:
    """What sets a state or a level, with places for the words."""

    def timed(words: str) -> str:
        return f"{words} {time}" if time and not is_first else words

    is_first = bool(time) and r.random() < 0.4
    first = f"{time}, " if is_first else ""
    if r.random() < 0.25:
        statements = NEW_STATEMENTS[kind] if is_new else STATEMENTS[kind]
        return first + r.choice(REMARKS).format(timed(r.choice(statements)))
    # The sentence, the request or both are new.
    new = r.choice(["sentence", "request", "both"]) if is_new else ""
    imperatives = IMPERATIVES if new in ("", "request") else NEW_IMPERATIVES
    requests = REQUESTS if new in ("", "sentence") else NEW_REQUESTS
    return first + r.choice(requests).format(timed(r.choice(imperatives[kind])))


def command(r: random.Random, *, is_new: bool = False) -> tuple[str, dict]:
    """A random command and its tool call.

    Args:
        is_new: in a sentence that no training example has.
    """
    kind = r.choice(["level", "state"])
    device, room = r.choice([*LEVELS] if kind == "level" else SWITCHED), r.choice(ROOMS)
    call, words = {"set": device, "room": room}, {"device": device, "room": room}
    if kind == "level":
        call["level"] = level = r.randint(1, 9) * 10
        words |= {"level": say_level(level, r), "verb": r.choice(LEVELS[device])}
        words["up"] = r.choice(["up", "down"])
    else:
        is_on = r.random() < 0.5
        call["state"] = words["state"] = "on" if is_on else "off"
        words |= {"start": "start" if is_on else "stop"}
        words |= {"run": "run" if is_on else "stop"}
    time = ""
    if r.random() < 0.6:
        hour, minute = r.randint(1, 12), r.randrange(0, 60, 15)
        call["at"] = f"{hour}:{minute:02}"
        time = f"at {say_time(hour, minute, r)}"
    text = sentence(kind, time, r, is_new=is_new)
    text = text.replace("{place}", r.choice(PLACES)).format(**words)
    return say_case(text, r), call


def split_of(answer: str) -> str:
    """The file of a tool call: one in ten is in `valid`, and one in `test`."""
    return {0: "valid", 1: "test"}.get(crc32(answer.encode()) % 10, "train")


def make() -> dict[str, list[dict]]:
    """All examples by split; a command occurs once."""
    r, seen = random.Random(SEED), set()
    held_out = {json.dumps(call) for call in HELD_OUT}
    splits: dict[str, list[dict]] = {}
    for split, size in SIZES.items():
        rows = splits[split] = []
        while len(rows) < size:
            is_new = split != "train" and len(rows) % 2 == 1
            words, call = command(r, is_new=is_new)
            answer = json.dumps(call)
            if words in seen or answer in held_out or split_of(answer) != split:
                continue
            seen.add(words)
            row = {"prompt": words, "completion": answer}
            if split != "train":
                row["skill"] = "new wording" if is_new else "known wording"
            rows.append(row)
    return splits


def main(folder: Path) -> None:
    """Write one JSONL file per split, and a small table with other names of columns."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = make()
    with (folder / "tickets.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["ticket", "answer_json"])
        few = [row for row in splits["train"] if " \"at\"" not in row["completion"]]
        few = few[:TABLE_ROWS]
        table.writerows([row["prompt"], row["completion"]] for row in few)
    for split, rows in splits.items():
        lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows]
        path = folder / f"{split}.jsonl"
        path.write_text("".join(lines), encoding="utf-8", newline="\n")
        print(f"{path}: {len(rows):,} examples, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]) if sys.argv[1:] else Path(__file__).parent / "commands")
