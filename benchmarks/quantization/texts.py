"""Texts of a benchmark: documents to learn from, and held-out sequences.

A text is a .txt of WikiText or TinyStories, or a .jsonl of GSM8K or of chats.
"""

import json
import re
import sys
from pathlib import Path

import real_model_divergence

sys.path.append(str(Path(__file__).parents[1]))
import gsm8k
import programs

HELD_OUT_TOKENS = 4096
# Titles of WikiText's articles, and the mark between TinyStories.
DOCUMENT_START = r"\n(?= = [^=\n]+ = \n)|<\|endoftext\|>"


def documents(file: str, folder: Path, characters: int | None = None) -> Path:
    """A text as JSONL: its first documents, and rows of a .jsonl as chats.

    Args:
        characters: of JSON, at which the file ends; None: the whole text.
    """
    path = Path(file)
    target = folder / f"{path.stem}-{path.suffix[1:]}.jsonl"
    if path.suffix == ".txt":
        texts = re.split(DOCUMENT_START, path.read_text())
        records = [{"text": text.strip()} for text in texts if text.strip()]
    else:
        rows = map(json.loads, path.read_text().splitlines())
        records = map(gsm8k.chat, rows)
    text = "\n".join(map(json.dumps, records))
    if characters and len(text) > characters:
        text = text[: text.rindex("\n", 0, characters)]
    target.write_text(text + "\n")
    return target.resolve()


def prepare(
    folder: Path, file: str, model: Path, length: int, num_answers: int | None = None
) -> None:
    """Write the held-out sequences of a text, unless they are there.

    Args:
        num_answers: chats of a .jsonl, of which only the answers count; None: whole
            chats in sequences of `length` tokens.
    """
    if (folder / "held-out.npz").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    options = {"text": None, "questions": None, "answers": num_answers}
    if num_answers and file.endswith(".jsonl"):
        options["questions"] = file
    else:
        options["text"] = str(documents(file, folder))
    options |= {"tokens": HELD_OUT_TOKENS, "length": length}
    command = [real_model_divergence.PROGRAM, "prepare", model, folder]
    programs.call([*command, json.dumps(options)])


def measure(folders: list[Path], model: Path) -> dict[str, list]:
    """By text, the sums of every held-out sequence."""
    record = {}
    for folder in folders:
        command = [real_model_divergence.PROGRAM, "measure", folder, model]
        (record[folder.name],) = programs.measure(command)["sequences"].values()
    return record
