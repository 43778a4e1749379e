"""The questions of an evaluation: examples that the models answer, all in one batch."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from itertools import islice, pairwise
from typing import Any

from ...data.answer_filters import FILTERS, has_one_form
from ...data.record_formats import DataRecord
from ...data.splits import in_turn
from ...generation.generator import Generator
from ...generation.kv_cache.batch import is_batchable
from ...generation.kv_cache.prefix import common_length
from ...generation.outputs import GenerationResponse
from ...generation.sequence import GenerationRequest
from ...generation.thinking import thinking_of, without_thinking
from ...interfaces import SINGLE_PROCESS, Communicator

# Words of a text that the models continue.
OPENING_WORDS = 24


@dataclass(eq=False)
class Question:
    """An example, and each model's greedy answer, without its chain of thought.

    Attributes:
        answers: by model; none of a prompt that is longer than the model's context.
    """

    record: DataRecord
    answers: dict[str, str] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        """The text that the models answer or continue."""
        record = self.record
        if record.messages:
            return "\n".join(str(m["content"]) for m in record.messages[:-1])
        words = (record.text or "").split(maxsplit=OPENING_WORDS)
        return record.prompt or " ".join(words[:OPENING_WORDS])

    @property
    def expected(self) -> str | None:
        """The example's own answer; None for a text, or if it is undesirable."""
        record = self.record
        if record.label is False:
            return None
        if record.messages:
            answer = record.messages[-1]
            return answer["content"] if answer["role"] == "assistant" else None
        return record.completion

    @property
    def skill(self) -> str:
        return self.record.skill or "answers"

    def encode(self, generator: Generator, *, thinking: bool) -> list[int]:
        """The tokens of the prompt, as such examples are trained."""
        record = self.record
        messages = [*(record.messages or ())][:-1]
        if record.prompt:
            messages = [{"role": "user", "content": record.prompt}]
        if not messages:
            return generator.encode_text(self.prompt)
        return generator.encode_chat(
            messages,
            thinking=thinking,
            tools=record.tools,
            template_kwargs=record.chat_template_kwargs,
        )

    def to_json(self) -> dict:
        """The entry of report.json."""
        return {
            "prompt": self.prompt,
            "expected": self.expected,
            "answers": self.answers,
        }


@dataclass
class Questions:
    """What all models of an evaluation answer.

    Attributes:
        samples: shown in the report.
        exact: with exactly one correct answer. A question may be in both.
        thinking_budget: tokens of a chain of thought before each answer; None = none.
    """

    samples: list[Question]
    exact: list[Question]
    thinking_budget: int | None = None
    _encoded: tuple[Any, dict[Question, list[int]]] | None = None

    @classmethod
    def choose(
        cls, records: Iterable[DataRecord], samples: int, exact: int, filter_name: str
    ) -> "Questions":
        """The first examples of every skill in turn, up to these counts.

        Without a filter, the examples with a skill have exactly one correct answer;
        if no example has a skill, those whose answer is short or JSON.
        """
        questions = [Question(r) for r in records]
        questions = [question for question in questions if question.prompt.strip()]
        has_skills = any(question.record.skill is not None for question in questions)

        def is_exact(question: Question) -> bool:
            if question.expected is None:
                return False
            if filter_name == "none":
                if has_skills:
                    return question.record.skill is not None
                return has_one_form(question.expected)
            return FILTERS[filter_name](question.expected) is not None

        has_one_answer = [*filter(is_exact, questions)]
        return cls(_in_turn(questions, samples), _in_turn(has_one_answer, exact))

    def __iter__(self):
        return iter(dict.fromkeys((*self.samples, *self.exact)))

    def prompts(self, generator: Generator) -> dict[Question, list[int]]:
        """The tokens of every prompt, made once for a model's tokenizer."""
        if self._encoded is None or self._encoded[0] is not generator.tokenizer:
            thinking = self.thinking_budget is not None
            prompts = {q: q.encode(generator, thinking=thinking) for q in self}
            self._encoded = generator.tokenizer, prompts
        return self._encoded[1]

    def fitting(self, generator: Generator) -> dict[Question, list[int]]:
        """The tokens of every prompt for which the model has positions."""
        prompts = self.prompts(generator)
        return {q: prompt for q, prompt in prompts.items() if fits(prompt, generator)}

    def answer(
        self,
        name: str,
        generator: Generator,
        max_tokens: int,
        advance: Callable[[Mapping[str, float]], None],
        ranks: Communicator = SINGLE_PROCESS,
    ) -> None:
        """Store the answers of a model, which are decoded together.

        Args:
            ranks: have the same model; each answers its share.
            advance: gets the prompt `tokens` and decoding `steps` that are done.
        """
        fitting = self.fitting(generator)
        questions = list(fitting)
        if ranks.size > 1:
            # Ranks get prompts of the same lengths.
            questions.sort(key=lambda question: len(fitting[question]))
        each = distinct_tokens(list(fitting.values())) / max(1, len(fitting))

        def complete(share: Iterable[Question]) -> Iterator[str]:
            requests = [
                self._request(generator, fitting[question], max_tokens)
                for question in share
            ]
            steps = DecodingSteps(batch_rows(generator, len(requests)))
            started = 0

            def count(response: GenerationResponse) -> None:
                nonlocal started
                before, first = steps.count, started
                steps.add_tokens(1, is_last=response.finish_reason is not None)
                started = len(requests) - generator.engine.num_waiting
                tokens = (started - first) * each * ranks.size
                # A stream that is read has tokens that came with those of another one.
                if started > first or steps.count > before:
                    advance({"tokens": tokens, "steps": steps.count - before})

            results = generator.generate_all(requests, on_token=count)
            return (self._answer(generator, result.text) for result in results)

        answers = ranks.divide(questions, complete)
        for question, answer in zip(questions, answers, strict=True):
            question.answers[name] = answer

    def _request(
        self, generator: Generator, prompt: list[int], max_tokens: int
    ) -> GenerationRequest:
        budget = self.thinking_budget
        if budget is not None:
            thinking = thinking_of(generator.tokenizer, prompt, budget)
            max_tokens += thinking.max_tokens
        return generator.request(prompt, max_tokens=max_tokens, thinking_budget=budget)

    def _answer(self, generator: Generator, text: str) -> str:
        if self.thinking_budget is None:
            return text
        return without_thinking(generator.tokenizer, text)


class DecodingSteps:
    """The steps in which an engine decodes answers, of which it reads one at a time.

    It decodes `rows` answers at once, and starts the next one where one has ended.
    """

    def __init__(self, rows: int):
        self.count = 0
        self._ends, self._length = [0] * rows, 0

    def add_tokens(self, tokens: int, *, is_last: bool) -> None:
        """The answer has these tokens more. The next answer comes after the last."""
        self._length += tokens
        end = self._ends[0] + self._length
        self.count = max(self.count, end)
        if is_last:
            heapreplace(self._ends, end)
            self._length = 0


def distinct_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens of prompts in all, but what several have in common only once."""
    ordered = sorted(prompts)
    # Those that begin alike follow each other.
    shared = (common_length(*pair) for pair in pairwise(ordered))
    return sum(map(len, ordered)) - sum(shared)


def batch_rows(generator: Generator, answers: int) -> int:
    """How many answers a generator decodes at once."""
    limit = generator.engine.max_batch_size
    return min(answers, limit if is_batchable(generator.model) else 1)


def fits(prompt: Sequence[int], generator: Generator) -> bool:
    """Whether the model has a position for every token of a prompt."""
    return generator.max_positions is None or len(prompt) <= generator.max_positions


def _in_turn(questions: list[Question], count: int) -> list[Question]:
    by_skill = defaultdict(list)
    for question in questions:
        by_skill[question.record.skill or ""].append(question)
    turns = in_turn(by_skill[skill] for skill in sorted(by_skill))
    return [*islice(turns, count)]
