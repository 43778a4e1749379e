"""What models answer, for people to look at: in training, and side by side."""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import zip_longest

from ..data.record_formats import DataRecord
from ..generation.engine import Generator
from ..run.logger import RunLogger

SAMPLE_TOKENS = 48
# Words of a text that are shown to the models, to be gone on with.
OPENING = 24


def write_samples(
    generator: Generator, prompts: list[str], logger: RunLogger, *, step: int
) -> None:
    """Answer every prompt, into samples.jsonl."""
    for prompt in prompts:
        answer = generator.chat(prompt, max_tokens=SAMPLE_TOKENS).text
        logger.sample({"step": step, "prompt": prompt, "answer": answer})


@dataclass
class SampleComparison:
    """A row, and what each model of the run makes of it."""

    row: DataRecord
    answers: dict[str, str] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        """What the models are asked, or go on with."""
        row = self.row
        if row.messages:
            return "\n".join(str(message["content"]) for message in row.messages[:-1])
        return row.prompt or " ".join(
            (row.text or "").split(maxsplit=OPENING)[:OPENING]
        )

    @property
    def expected(self) -> str | None:
        """What the row itself says there; None of text, which may go on anyhow."""
        row = self.row
        return row.messages[-1]["content"] if row.messages else row.completion

    def ask(self, name: str, generator: Generator) -> None:
        """Keep the answer of a model, greedy and without a chain of thought.

        There is none to a prompt that is longer than the model can read.
        """
        if self.row.messages:
            asked = [*self.row.messages[:-1]]
            prompt = generator.encode_chat(asked, thinking=False)
        else:
            prompt = generator.encode_text(self.prompt)
        if generator.max_positions is None or len(prompt) <= generator.max_positions:
            answer = generator.generate(prompt, max_tokens=SAMPLE_TOKENS)
            self.answers[name] = answer.text

    def to_json(self) -> dict:
        """For report.json."""
        return {
            "prompt": self.prompt,
            "expected": self.expected,
            "answers": self.answers,
        }


def shown_rows(rows: list[DataRecord], count: int) -> list[SampleComparison]:
    """The first rows of every kind of skill, in turn, that ask for something."""
    kinds = defaultdict(list)
    for row in rows:
        if SampleComparison(row).prompt.strip():
            kinds[row.skill].append(row)
    turns = zip_longest(*kinds.values())
    return [SampleComparison(row) for turn in turns for row in turn if row][:count]
