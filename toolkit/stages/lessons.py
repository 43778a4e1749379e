"""What a draft is taught and examined on: answers of the target to rows' prompts."""

from functools import cached_property

from ..draft import answers
from ..draft.answers import Prompt
from ..draft.targets import Lessons
from ..errors import UserError
from ..generate.answering import Answerer
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
        return self._lessons(self._asked(rows, self.config.answers.prompts))

    @cached_property
    def held_out(self) -> Lessons:
        """Of the validation rows."""
        return self._lessons(self.held_out_prompts(self.config.answers.held_out))

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

    def _lessons(self, asked: list[Prompt]) -> Lessons:
        settings, context = self.config.answers, self.context
        report = context.report
        answerer = Answerer(
            lambda: self.target.model,
            self.digest,
            frozenset(self.target.tokenizer.eos_token_ids),
            report.say,
            report.warn,
        )
        report.say(f"{len(asked):,} prompts for the target to answer")
        examples = answers.answered(asked, settings, answerer, seed=context.seed)
        return Lessons(
            examples,
            self.target.model,
            key=self.digest,
            max_length=context.data.max_length + settings.max_tokens,
            tokens=self.config.batch_tokens,
            top_k=settings.top_k,
            seed=context.seed,
            report=report,
        )
