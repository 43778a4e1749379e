"""What a draft is taught and examined on: answers of the target to rows' prompts."""

from functools import cached_property

from ..config.draft import DraftConfig
from ..data.tokenization import Example
from ..draft import dataset
from ..draft.acceptance import ReferenceCompletion
from ..draft.benchmark import decoding_modes, with_seed_offset
from ..draft.dataset import DistillationBatches, Prompt, PromptSets, prompt_sets
from ..errors import UserError
from ..generation.batching import GenerationRequest
from ..generation.completions import CachedGenerator
from ..models.checkpoint import config_int
from ..models.loader import LoadedModel
from .context import StageContext


class DraftData:
    """Lessons of a distill stage, each made when first asked for.

    Args:
        digest: of the target's files.
    """

    def __init__(
        self,
        config: DraftConfig,
        context: StageContext,
        target: LoadedModel,
        digest: str,
    ):
        self.config = config
        self.context = context
        self.target = target
        self.digest = digest

    @cached_property
    def lessons(self) -> DistillationBatches:
        """Of the training rows."""
        rows = self.context.rows.train
        asked = self._asked(rows, self.config.data_generation.num_prompts)
        return self._lessons(self._answered(asked))

    @cached_property
    def held_out(self) -> DistillationBatches:
        """Of the validation rows."""
        rows = self.context.rows.valid
        asked = self._asked(rows, self.config.data_generation.num_eval_prompts)
        return self._lessons(self._answered(asked))

    @cached_property
    def exam(self) -> dict[str, list[ReferenceCompletion]]:
        """What the target will say in the trial, by way of sampling."""
        trial, answerer = self.config.benchmark, self._answerer
        texts = {}
        for name, sampling in decoding_modes(
            trial.temperature, self.context.seed
        ).items():
            requests = [
                GenerationRequest(
                    prompt.tokens,
                    trial.max_tokens,
                    with_seed_offset(sampling, number),
                    answerer.stop_tokens,
                )
                for number, prompt in enumerate(self.tried)
            ]
            pairs = zip(self.tried, answerer.generate(requests), strict=True)
            texts[name] = [
                ReferenceCompletion(self.target.model, prompt.tokens, said, sampling)
                for prompt, said in pairs
            ]
        return texts

    @cached_property
    def suites(self) -> PromptSets:
        """Prompts of the trial, of the validation rows."""
        rows, count = self.context.rows.valid, self.config.benchmark.num_prompts
        tokenizer, longest = self.target.tokenizer, self._longest
        found = prompt_sets(rows, tokenizer, count=count, max_prompt_tokens=longest)
        self._require(found)
        return found

    @property
    def tried(self) -> list[Prompt]:
        """All of them, in their order."""
        return [prompt for own in self.suites.values() for prompt in own]

    def _asked(self, rows, count: int) -> list[Prompt]:
        tokenizer, longest = self.target.tokenizer, self._longest
        asked = dataset.select_prompts(
            rows, tokenizer, count=count, max_prompt_tokens=longest
        )
        self._require(asked)
        return asked

    def _require(self, asked) -> None:
        if not asked:
            raise UserError(
                f"no row has a prompt of at most {self._longest} tokens to answer",
                hint="raise data.max_seq_length, or lower answers.max_tokens",
            )

    @property
    def _longest(self) -> int:
        """Tokens of a prompt that leaves room for its answer."""
        longest = self.context.data.max_seq_length
        if positions := config_int(self.target.config, "max_position_embeddings"):
            config = self.config
            answer = max(config.data_generation.max_tokens, config.benchmark.max_tokens)
            longest = min(longest, positions - answer)
        return longest

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Those that end an answer."""
        return frozenset(self.target.tokenizer.eos_token_ids)

    @property
    def _answerer(self) -> CachedGenerator:
        logger = self.context.logger
        return CachedGenerator(
            lambda: self.target.model,
            self.digest,
            self.stop_tokens,
            logger.info,
            logger.warning,
        )

    def _answered(self, asked: list[Prompt]) -> list[Example]:
        context, settings = self.context, self.config.data_generation
        context.logger.info(f"{len(asked):,} prompts for the target to answer")
        return dataset.generate_completions(
            asked, settings, self._answerer, seed=context.seed
        )

    def _lessons(self, examples: list[Example]) -> DistillationBatches:
        settings, context = self.config.data_generation, self.context
        return DistillationBatches(
            examples,
            self.target.model,
            key=self.digest,
            max_seq_length=context.data.max_seq_length + settings.max_tokens,
            tokens=self.config.batch_tokens,
            top_k=settings.top_k,
            seed=context.seed,
            logger=context.logger,
        )
