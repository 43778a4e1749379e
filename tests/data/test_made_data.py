"""What the programs of the folder `data` make is reproducible, balanced, correct and
held out, and has no duplicates."""

import json
from collections import Counter
from datetime import date
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "data"


def read_rows(name, split):
    with (DATA / name / f"{split}.jsonl").open(encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


@pytest.mark.parametrize("name", ["skills", "preferences"])
def test_scripts_reproduce_their_files_byte_for_byte(
    load_script, tmp_path, capsys, name
):
    script = load_script(f"make_{name}")
    script.main(tmp_path)
    for split in script.PER_KIND:
        shipped = (DATA / name / f"{split}.jsonl").read_bytes()
        assert (tmp_path / f"{split}.jsonl").read_bytes() == shipped


def test_commands_are_reproducible_and_held_out(load_script, tmp_path, capsys):
    script = load_script("make_commands")
    script.main(tmp_path)
    assert capsys.readouterr().out.count("examples") == 3
    # The commands of the documentation are in no file, and no call is in two.
    seen = {json.dumps(call) for call in script.HELD_OUT}
    prompts = []
    table = tmp_path / "tickets.csv"
    assert table.read_bytes() == (DATA / "commands" / table.name).read_bytes()
    for split, size in script.SIZES.items():
        made = tmp_path / f"{split}.jsonl"
        assert made.read_bytes() == (DATA / "commands" / made.name).read_bytes()
        rows = [json.loads(line) for line in made.read_text().splitlines()]
        assert len(rows) == size
        calls = {row["completion"] for row in rows}
        assert not calls & seen
        seen |= calls
        has_time = sum("at" in json.loads(call) for call in calls) / len(calls)
        assert 0.5 < has_time < 0.9, "commands with and without a time"
        prompts += [row["prompt"] for row in rows]
    assert len(set(prompts)) == len(prompts)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1_500_000


def test_new_wordings_of_commands_are_in_no_training_example(load_script):
    script = load_script("make_commands")
    values = [*script.ROOMS, *script.SWITCHED, *script.TENS, *script.HOURS]
    values += ["half", "quarter", "percent", "o'clock", *script.QUARTERS.values()]

    def wording(row):
        """The words of a command without rooms, devices, numbers and marks."""
        words = row["prompt"].lower().replace("'s", "").split()
        words = [word.strip(",.!?%") for word in words]
        return " ".join(w for w in words if w not in values and not w[0].isdigit())

    known = {wording(row) for row in read_rows("commands", "train")}
    rows = read_rows("commands", "valid") + read_rows("commands", "test")
    share = {}
    for skill in ("known wording", "new wording"):
        found = [wording(row) in known for row in rows if row["skill"] == skill]
        assert len(found) == 320
        share[skill] = sum(found) / len(found)
    assert share["new wording"] == 0
    assert share["known wording"] > 0.6


@pytest.mark.parametrize("split", ["train", "valid"])
def test_rejected_answers_differ_from_right_ones(split):
    right = dict(map(_question_and_answer, read_rows("skills", split)))
    for row in read_rows("preferences", split):
        [prompt], [chosen], [rejected] = row["prompt"], row["chosen"], row["rejected"]
        assert chosen["content"] == right[prompt["content"]]
        assert rejected["content"].strip() not in ("", chosen["content"])


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("make_skills")


@pytest.fixture(scope="module")
def splits():
    return {s: read_rows("skills", s) for s in ("train", "valid", "test")}


def _question_and_answer(record):
    user, assistant = record["messages"]
    assert (user["role"], assistant["role"]) == ("user", "assistant")
    return user["content"], assistant["content"]


def test_larger_test_split_keeps_the_other_records(script, splits):
    datasets = script.make(test=40)
    assert datasets["train"] == splits["train"]
    assert datasets["valid"] == splits["valid"]
    shipped = {json.dumps(record) for record in splits["test"]}
    assert len(datasets["test"]) == 21 * 40
    assert shipped < {json.dumps(record) for record in datasets["test"]}
    with pytest.raises(SystemExit, match="roman has fewer than 1354 tasks"):
        script.tasks(script.roman, 525 + 29 + 800)


def test_splits_have_balanced_skills(splits):
    for records in splits.values():
        counts = Counter(record["skill"] for record in records)
        assert len(counts) == 21
        assert len(set(counts.values())) == 1


def test_questions_are_unique(splits):
    questions = [
        _question_and_answer(record)[0]
        for records in splits.values()
        for record in records
    ]
    assert len(questions) == len(set(questions))
    prompts = (DATA / "prompts.txt").read_text().splitlines()
    assert not set(prompts) & set(questions)


def test_tasks_counts_phrasings_of_one_task_once(script):
    def kind(r):
        number = r.randrange(30)
        return [f"one {number}", f"other {number}"], "answer"

    records = script.tasks(kind, 30)
    words = [record["messages"][0]["content"].split() for record in records]
    assert {word for word, _ in words} == {"one", "other"}
    assert len({number for _, number in words}) == 30


def test_dataset_size_and_lengths_are_limited(splits):
    assert sum(f.stat().st_size for f in (DATA / "skills").iterdir()) <= 1_900_000
    pairs = [
        _question_and_answer(record)
        for records in splits.values()
        for record in records
    ]
    assert max(len(question) for question, _ in pairs) <= 80
    assert all(answer.strip() == answer != "" for _, answer in pairs)


def _numbers(text):
    return [int(part) for part in text.split(":", 1)[-1].split(",")]


CHECKS = {
    "addition": lambda q, a: int(a) == sum(map(int, q.replace("+", " ").split()[:-1])),
    "sort_numbers": lambda q, a: (
        _numbers(a) == sorted(_numbers(q), reverse="high" in q or "falling" in q)
    ),
    "json_make": lambda q, a: (
        ", ".join(f"{k} {v}" for k, v in json.loads(a).items()) == q.split(": ", 1)[1]
    ),
    "date": lambda q, a: (
        (date.fromisoformat(a) - date.fromisoformat(q.split()[-1][:-1])).days
        == (1 if "after" in q else -1)
    ),
    "hexadecimal": lambda q, a: (
        int(a, 0)
        in [int(word.strip(".:"), 0) for word in q.split() if word[0] in "0123456789"]
    ),
    "remove_vowels": lambda q, a: (
        a == q.split(": ")[1].translate(str.maketrans("", "", "aeiou"))
    ),
}


@pytest.mark.parametrize("skill", CHECKS)
def test_answers_are_correct(splits, skill):
    pairs = [_question_and_answer(r) for r in splits["train"] if r["skill"] == skill]
    if skill == "addition":
        pairs = [pair for pair in pairs if pair[0].endswith("=")]
    assert len(pairs) > 100
    assert [pair for pair in pairs if not CHECKS[skill](*pair)] == []


@pytest.mark.parametrize(
    ("number", "letters"),
    [
        (1, "I"),
        (4, "IV"),
        (49, "XLIX"),
        (94, "XCIV"),
        (299, "CCXCIX"),
        (388, "CCCLXXXVIII"),
    ],
)
def test_roman_writes_roman_numerals(script, number, letters):
    assert script._roman(number) == letters
