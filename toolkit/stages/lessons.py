"""What a draft is taught and examined on: answers of the target to rows' prompts."""

from functools import cached_property

from ..data.template import Example
from ..draft import answers
from ..draft.answers import Prompt
from ..draft.exam import Text
from ..draft.suites import Suites, suites
from ..draft.targets import Lessons
from ..draft.trial import numbered, ways
from ..errors import UserError
from ..generate.answering import Answerer, answer_all
from ..generate.batching import Request
from ..model.folder import setting
from ..model.load import Loaded
from .context import Context
from .distill import Config


class Schooling:
    """Lessons of a distill stage, each made when first asked for.

    Args:
        digest: of the target's files.
    """

    def __init__(self, config: Config, context: Context, target: Loaded, digest: str):
        self.config = config
        self.context = context
        self.target = target
        self.digest = digest

    @cached_property
    def lessons(self) -> Lessons:
        """Of the training rows."""
        rows = self.context.rows.train
        asked = self._asked(rows, self.config.answers.prompts)
        return self._lessons(self._answered(asked))

    @cached_property
    def held_out(self) -> Lessons:
        """Of the validation rows."""
        rows = self.context.rows.valid
        asked = self._asked(rows, self.config.answers.held_out)
        return self._lessons(self._answered(asked))

    @cached_property
    def exam(self) -> dict[str, list[Text]]:
        """What the target will say in the trial, by way of sampling."""
        trial, answerer = self.config.trial, self._answerer
        texts = {}
        for name, sampling in ways(trial.temperature, self.context.seed).items():
            requests = [
                Request(
                    prompt.tokens,
                    trial.max_tokens,
                    numbered(sampling, number),
                    answerer.end_tokens,
                )
                for number, prompt in enumerate(self.tried)
            ]
            pairs = zip(self.tried, answer_all(requests, answerer), strict=True)
            texts[name] = [
                Text(self.target.model, prompt.tokens, said, sampling)
                for prompt, said in pairs
            ]
        return texts

    @cached_property
    def suites(self) -> Suites:
        """Prompts of the trial, of the validation rows."""
        rows, count = self.context.rows.valid, self.config.trial.prompts
        tokenizer, longest = self.target.tokenizer, self._longest
        found = suites(rows, tokenizer, count=count, longest=longest)
        self._require(found)
        return found

    @property
    def tried(self) -> list[Prompt]:
        """All of them, in their order."""
        return [prompt for own in self.suites.values() for prompt in own]

    def _asked(self, rows, count: int) -> list[Prompt]:
        tokenizer, longest = self.target.tokenizer, self._longest
        asked = answers.prompts(rows, tokenizer, count=count, longest=longest)
        self._require(asked)
        return asked

    def _require(self, asked) -> None:
        if not asked:
            raise UserError(
                f"no row has a prompt of at most {self._longest} tokens to answer",
                hint="raise data.max_length, or lower answers.max_tokens",
            )

    @property
    def _longest(self) -> int:
        """Tokens of a prompt that leaves room for its answer."""
        longest = self.context.data.max_length
        if positions := setting(self.target.config, "max_position_embeddings"):
            config = self.config
            answer = max(config.answers.max_tokens, config.trial.max_tokens)
            longest = min(longest, positions - answer)
        return longest

    @property
    def end_tokens(self) -> frozenset[int]:
        """Those that end an answer."""
        return frozenset(self.target.tokenizer.eos_token_ids)

    @property
    def _answerer(self) -> Answerer:
        report = self.context.report
        return Answerer(
            lambda: self.target.model,
            self.digest,
            self.end_tokens,
            report.say,
            report.warn,
        )

    def _answered(self, asked: list[Prompt]) -> list[Example]:
        context, settings = self.context, self.config.answers
        context.report.say(f"{len(asked):,} prompts for the target to answer")
        return answers.answered(asked, settings, self._answerer, seed=context.seed)

    def _lessons(self, examples: list[Example]) -> Lessons:
        settings, context = self.config.answers, self.context
        return Lessons(
            examples,
            self.target.model,
            key=self.digest,
            max_length=context.data.max_length + settings.max_tokens,
            tokens=self.config.batch_tokens,
            top_k=settings.top_k,
            seed=context.seed,
            report=context.report,
        )
