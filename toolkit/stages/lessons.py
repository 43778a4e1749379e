"""What a draft is taught and examined on: answers of the target to rows' prompts."""

from functools import cached_property

from ..data.template import Example
from ..draft import answers
from ..draft.answers import Prompt
from ..draft.exam import Text
from ..draft.targets import Lessons
from ..errors import UserError
from ..generate.answering import Answerer
from ..generate.sampling import Sampling
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
        return self._lessons(self._held_out_answers)

    @cached_property
    def exam(self) -> dict[float, list[Text]]:
        """The answers to the validation rows, by temperature."""
        settings = self.config.answers
        texts: dict[float, list[Text]] = {}
        for number, example in enumerate(self._held_out_answers):
            heat = settings.temperature(number)
            prompt, said = example.tokens[~example.mask], example.tokens[example.mask]
            sampling = Sampling(temperature=heat)
            text = Text(self.target.model, prompt.tolist(), said.tolist(), sampling)
            texts.setdefault(heat, []).append(text)
        return texts

    @cached_property
    def _held_out_answers(self) -> list[Example]:
        return self._answered(self.held_out_prompts(self.config.answers.held_out))

    def held_out_prompts(self, count: int) -> list[Prompt]:
        """Prompts of the validation rows, at most so many."""
        return self._asked(self.context.rows.valid, count)

    def _asked(self, rows, count: int) -> list[Prompt]:
        longest = self.context.data.max_length
        if positions := setting(self.target.config, "max_position_embeddings"):
            longest = min(longest, positions - self.config.answers.max_tokens)
        tokenizer = self.target.tokenizer
        asked = answers.prompts(rows, tokenizer, count=count, longest=longest)
        if not asked:
            raise UserError(
                f"no row has a prompt of at most {longest} tokens to answer",
                hint="raise data.max_length, or lower answers.max_tokens",
            )
        return asked

    def _answered(self, asked: list[Prompt]) -> list[Example]:
        context, report = self.context, self.context.report
        answerer = Answerer(
            lambda: self.target.model,
            self.digest,
            frozenset(self.target.tokenizer.eos_token_ids),
            report.say,
            report.warn,
        )
        report.say(f"{len(asked):,} prompts for the target to answer")
        settings = self.config.answers
        return answers.answered(asked, settings, answerer, seed=context.seed)

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
