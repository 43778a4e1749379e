"""Write data/skills/: chats with one question and one exact answer, from a fixed seed.

    python data/make_skills.py [FOLDER [TEST_EXAMPLES_PER_KIND]]

No task (a kind with its numbers and words, in any wording) is in two of the files.
"""

# ruff: noqa: SIM905 (a paragraph of words reads better than 250 quoted ones)

import datetime
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

SEED = 20240229
PER_KIND = {"train": 525, "valid": 29, "test": 29}
WORDS = """
able acid aged alarm apple april arm army atom aunt baby back bag ball band bank
basket beach bean bear bed bell belt bird black blue board boat body bone book bottle
box bread brick bridge brown brush bus butter button cake camp candle cap car card cat
chain chair cheese chess child city clock cloud coat coin cold comb cook copper corn
cotton cow cup dance dark day deer desk dog door dream dress drum duck dust eagle ear
earth east egg engine eye face farm fast father feather field fire fish flag floor
flower fly fog food foot fork forest fox frog fruit game garden gate girl glass glove
goat gold good grass green hair hammer hand hat heart hill honey horn horse house ice
ink iron island jar jelly jewel joke jump key king kite knee knife lake lamp land leaf
leg lemon letter light lion lip lock map market meal metal milk mint money month moon
morning mouse music nail name neck needle nest net night north nose nut oak ocean
office oil old onion open orange oven page paint paper park pen pencil pepper pig pin
plane plant plate pocket pot prize queen rabbit rain red rice ring river road rock
roof room root rope rose sail salt sand school sea seed sheep ship shirt shoe silk
silver sister six snake snow soap sock song soup spoon spring star stone store storm
street sugar summer sun table tail tea ten tent tiger time toast toe top town toy
train tree truck uncle valley violin wall warm watch water wave west wheel white wind
window wing winter wolf wood wool word yard year yellow
""".split()
NAMES = "ada ben cora dan eva finn gus hana ivan june kai lena max nora omar".split()
FIELDS = {
    "name": NAMES,
    "age": range(5, 90),
    "city": "oslo rome lima cairo paris tokyo delhi quito bern dakar".split(),
    "color": "red blue green black white brown yellow".split(),
    "count": range(2, 60),
    "pet": "cat dog bird fish horse rabbit".split(),
}
UNITS = {
    ("hour", "minutes"): 60,
    ("minute", "seconds"): 60,
    ("day", "hours"): 24,
    ("week", "days"): 7,
    ("year", "months"): 12,
    ("meter", "centimeters"): 100,
    ("kilometer", "meters"): 1000,
    ("kilogram", "grams"): 1000,
    ("liter", "milliliters"): 1000,
    ("centimeter", "millimeters"): 10,
    ("dozen", "pieces"): 12,
    ("foot", "inches"): 12,
}
ROMAN = {
    **{100: "C", 90: "XC", 50: "L", 40: "XL"},
    **{10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"},
}

# A task: its wordings, the first of which identifies it, and the answer.
Task = tuple[list[str], str]


def _listed(items) -> str:
    return ", ".join(map(str, items))


def _compact(value: object) -> str:
    return json.dumps(value, separators=(", ", ": "))


def addition(r: random.Random) -> Task:
    a, b = r.randint(1, 99), r.randint(1, 99)
    return [f"What is {a} + {b}?", f"Add {a} and {b}.", f"{a} + {b} ="], str(a + b)


def subtraction(r: random.Random) -> Task:
    b, a = sorted((r.randint(1, 99), r.randint(1, 99)))
    wordings = [f"What is {a} - {b}?", f"Subtract {b} from {a}.", f"{a} - {b} ="]
    return wordings, str(a - b)


def multiplication(r: random.Random) -> Task:
    a, b = r.sample([r.randint(2, 12), r.randint(2, 60)], 2)
    return [f"What is {a} * {b}?", f"Multiply {a} by {b}.", f"{a} * {b} ="], str(a * b)


def count_letter(r: random.Random) -> Task:
    word = r.choice(WORDS)
    letter = r.choice(word) if r.random() < 0.8 else r.choice("aeionrst")
    wordings = [
        f"How many times is the letter {letter} in {word}?",
        f"Count the letter {letter} in {word}.",
        f"How often does {word} have the letter {letter}?",
    ]
    return wordings, str(word.count(letter))


def count_words(r: random.Random) -> Task:
    words = r.choices(WORDS, k=r.randint(2, 7))
    text = " ".join(words)
    wordings = [f"How many words: {text}", f"Count the words: {text}"]
    return wordings, str(len(words))


def sort_numbers(r: random.Random) -> Task:
    numbers = r.sample(range(100), r.randint(3, 5))
    text = _listed(numbers)
    if r.random() < 0.7:
        wordings = [f"Sort: {text}", f"Sort these numbers: {text}"]
        return wordings, _listed(sorted(numbers))
    wordings = [f"Sort from high to low: {text}", f"Sort in falling order: {text}"]
    return wordings, _listed(sorted(numbers, reverse=True))


def sort_words(r: random.Random) -> Task:
    words = r.sample(WORDS, r.randint(2, 4))
    text = _listed(words)
    wordings = [
        f"Sort by the alphabet: {text}",
        f"Put in alphabetical order: {text}",
        f"Sort these words: {text}",
    ]
    return wordings, _listed(sorted(words))


def reverse(r: random.Random) -> Task:
    if r.random() < 0.3:
        word = r.choice(WORDS)
        return [f"Spell {word} backwards.", f"Reverse the word {word}."], word[::-1]
    items = r.sample(r.choice((WORDS, range(100))), r.randint(3, 4))
    text = _listed(items)
    return [f"Reverse the list: {text}", f"Reverse: {text}"], _listed(items[::-1])


def letter_case(r: random.Random) -> Task:
    words = " ".join(r.sample(WORDS, r.randint(1, 3)))
    name, change = r.choice(
        [("upper", str.upper), ("lower", str.lower), ("title", str.title)]
    )
    text = words.upper() if name == "lower" else words
    wordings = [f"Write in {name} case: {text}", f"Change to {name} case: {text}"]
    return wordings, change(words)


def json_get(r: random.Random) -> Task:
    keys = r.sample(list(FIELDS), r.randint(2, 3))
    record = {key: r.choice(FIELDS[key]) for key in keys}
    key, text = r.choice(keys), _compact(record)
    wordings = [f"What is the {key} in {text}?", f"Get {key} from {text}"]
    return wordings, str(record[key])


def json_make(r: random.Random) -> Task:
    keys = r.sample(list(FIELDS), 2)
    record = {key: r.choice(FIELDS[key]) for key in keys}
    text = _listed(f"{key} {value}" for key, value in record.items())
    return [f"Write as JSON: {text}", f"Make JSON: {text}"], _compact(record)


def date(r: random.Random) -> Task:
    day = datetime.date(2000, 1, 1) + datetime.timedelta(r.randrange(30 * 365))
    word, step = r.choice([("after", 1), ("after", 1), ("before", -1)])
    wordings = [f"What day comes {word} {day}?", f"Which date is one day {word} {day}?"]
    return wordings, str(day + datetime.timedelta(step))


def units(r: random.Random) -> Task:
    (one, many), factor = r.choice(list(UNITS.items()))
    count = r.randint(2, 60)
    plural = {"foot": "feet", "dozen": "dozen"}.get(one, one + "s")
    wordings = [
        f"How many {many} are {count} {plural}?",
        f"{count} {plural} in {many}:",
    ]
    return wordings, str(count * factor)


def extreme(r: random.Random) -> Task:
    numbers = r.sample(range(100), r.randint(3, 5))
    names, pick = r.choice([(("largest", "max"), max), (("smallest", "min"), min)])
    text = _listed(numbers)
    wordings = [f"What is the {names[0]} of {text}?", f"{names[1]} of {text}"]
    return wordings, str(pick(numbers))


def letter_at(r: random.Random) -> Task:
    word = r.choice(WORDS)
    name, index = r.choice([("first", 0), ("last", -1), ("second", 1), ("third", 2)])
    wordings = [
        f"What is the {name} letter of {word}?",
        f"The {name} letter of {word}:",
    ]
    return wordings, word[index]


def remove_vowels(r: random.Random) -> Task:
    words = " ".join(r.sample(WORDS, r.randint(1, 2)))
    wordings = [f"Remove the vowels: {words}", f"Write without vowels: {words}"]
    return wordings, "".join(c for c in words if c not in "aeiou")


def compare(r: random.Random) -> Task:
    a, b = r.sample(range(100), 2)
    if r.random() < 0.5:
        sign = r.choice("<>")
        wordings = [f"Is {a} {sign} {b}?", f"True or not: {a} {sign} {b}?"]
        return wordings, "yes" if (a < b) == (sign == "<") else "no"
    name, pick = r.choice([("larger", max), ("smaller", min)])
    wordings = [f"Which is {name}, {a} or {b}?", f"The {name} of {a} and {b}:"]
    return wordings, str(pick(a, b))


def even_odd(r: random.Random) -> Task:
    number = r.randrange(1000)
    wordings = [f"Is {number} even or odd?", f"Even or odd: {number}"]
    return wordings, "odd" if number % 2 else "even"


def next_number(r: random.Random) -> Task:
    start, step = r.randint(0, 50), r.randint(1, 10)
    terms = [start + step * i for i in range(5)]
    if r.random() < 0.2:
        terms.reverse()
    text = _listed(terms[:4])
    return [f"What comes next: {text}?", f"Continue: {text}"], str(terms[4])


def _roman(number: int) -> str:
    text = ""
    for value, letters in ROMAN.items():
        text += letters * (number // value)
        number %= value
    return text


def roman(r: random.Random) -> Task:
    number = r.randint(1, 399)
    letters = _roman(number)
    if r.random() < 0.5:
        wordings = [
            f"Write {number} in Roman numerals.",
            f"{number} as a Roman numeral:",
        ]
        return wordings, letters
    return [f"What number is {letters}?", f"Roman {letters} as a number:"], str(number)


def hexadecimal(r: random.Random) -> Task:
    number = r.randrange(400)
    if r.random() < 0.5:
        wordings = [f"Write {number} in hex.", f"Convert {number} to hexadecimal."]
        return wordings, f"0x{number:x}"
    return [f"Write 0x{number:x} in decimal.", f"0x{number:x} as decimal:"], str(number)


KINDS: tuple[Callable[[random.Random], Task], ...] = (
    addition, subtraction, multiplication, count_letter, count_words, sort_numbers,
    sort_words, reverse, letter_case, json_get, json_make, date, units, extreme,
    letter_at, remove_vowels, compare, even_odd, next_number, roman, hexadecimal,
)  # fmt: skip


def tasks(kind: Callable[[random.Random], Task], count: int) -> list[dict]:
    """`count` examples of one kind, all of different tasks."""
    # One generator per kind, so that a change of one kind does not change the others.
    r = random.Random(f"{SEED} {kind.__name__}")
    examples: dict[str, dict] = {}
    for _ in range(20 * count):  # Some kinds have few tasks, so tasks repeat.
        if len(examples) == count:
            return list(examples.values())
        wordings, answer = kind(r)
        question = r.choice(wordings)
        turns = [("user", question), ("assistant", answer)]
        messages = [{"role": role, "content": content} for role, content in turns]
        examples.setdefault(wordings[0], {"messages": messages, "skill": kind.__name__})
    sys.exit(f"{kind.__name__} has fewer than {count} tasks")


def make(test: int = PER_KIND["test"]) -> dict[str, list[dict]]:
    """All examples by split, in random order; `test` test examples of every kind."""
    counts = PER_KIND | {"test": test}
    splits: dict[str, list[dict]] = {split: [] for split in counts}
    for kind in KINDS:
        examples = iter(tasks(kind, sum(counts.values())))
        for split, count in counts.items():
            splits[split] += [next(examples) for _ in range(count)]
    for split, examples in splits.items():
        random.Random(f"{SEED} {split}").shuffle(examples)
    return splits


def main(folder: Path, test: int = PER_KIND["test"]) -> None:
    """Write one JSONL file per split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, examples in make(test).items():
        lines = [
            json.dumps(example, separators=(",", ":")) + "\n" for example in examples
        ]
        path = folder / f"{split}.jsonl"
        path.write_text("".join(lines), encoding="utf-8", newline="\n")
        print(f"{path}: {len(examples):,} examples, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    folder, *test = sys.argv[1:] or [Path(__file__).parent / "skills"]
    main(Path(folder), *map(int, test))
