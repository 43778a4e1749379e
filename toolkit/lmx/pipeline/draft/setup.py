"""What the distillation of a draft model starts from: its data and its weights."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ...config.draft import DraftConfig, DraftModelConfig
from ...data.record_formats import DataRecord
from ...data.tokenization import Example
from ...data.tokenizer_files import require_same_tokenizer
from ...draft import dataset
from ...draft.acceptance import ReferenceCompletion
from ...draft.benchmark import decoding_modes
from ...draft.dataset import DistillationBatches, Prompt, PromptSets, prompt_sets
from ...draft.pruning import most_important_blocks, prune, pruned_config, rank_layers
from ...draft.report import require_servable
from ...draft.text_first import Batches, choose_text
from ...errors import UserError
from ...generation.completions import CachedGenerator
from ...generation.sequence import GenerationRequest
from ...interfaces import SINGLE_PROCESS, Communicator
from ...models.checkpoint import config_int, read_config
from ...models.dtypes import compute_dtype, set_compute_dtype
from ...models.loader import LoadedModel
from ...quantization.packing import dequantized_model
from ..context import MODELS, StageContext, write_model
from ..train.batches import tokenized_examples

# The folder of the initial draft model, in that of the stage.
INITIAL = "initial"


class DraftData:
    """Prompts and target completions of a draft stage.

    Args:
        digest: hash of the target's files.

    Attributes:
        teacher: makes the predictions; the target, or a function with its results.
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
        self.teacher: Callable[[mx.array], mx.array] = target.model

    def generate(self) -> None:
        """Complete the prompts, each rank its share; all ranks get all completions."""
        config, context = self.config.data_generation, self.context
        self._train_examples = self._completed("train", config.num_prompts)
        self._eval_examples = self._completed("valid", config.num_eval_prompts)
        self._text_examples: list[Example] = []
        if count := config.text_tokens:
            everything = context.data.model_copy(update={"loss_on": "all"})
            context = replace(context, data=everything)
            examples = tokenized_examples(context, self.target)
            text = [*choose_text(examples, count, seed=context.seed)]
            tokens = sum(len(example.tokens) for example in text)
            context.logger.info(f"text: {len(text):,} examples, {tokens:,} tokens")
            self._text_examples = text

    @cached_property
    def train_batches(self) -> DistillationBatches:
        """Completions of the training prompts, with the target's predictions."""
        return self._batches(self._train_examples)

    @cached_property
    def text_batches(self) -> DistillationBatches | None:
        """Text of the training data, with the target's predictions."""
        return self._batches(self._text_examples) if self._text_examples else None

    @cached_property
    def eval_batches(self) -> DistillationBatches:
        """Completions of the validation prompts, with the target's predictions."""
        return self._batches(self._eval_examples)

    def with_text(
        self, prepare: Callable[[DistillationBatches], Batches]
    ) -> list[Batches]:
        """The batches of the training: of text, if there is any, and of completions.

        Args:
            prepare: makes batches from those with the target's predictions.
        """
        parts = [self.text_batches, self.train_batches]
        return [prepare(batches) for batches in parts if batches]

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """How often every token is trained, int [vocab_size]."""
        counts = self.train_batches.token_counts(vocab_size)
        if self.text_batches:
            counts = counts + self.text_batches.token_counts(vocab_size)
        return counts

    @cached_property
    def references(self) -> dict[str, list[ReferenceCompletion]]:
        """The target's completions of the benchmark prompts, by decoding mode.

        Only the first rank uses them.
        """
        return self._references(self.benchmark_prompts)

    @cached_property
    def selection_references(self) -> dict[str, list[ReferenceCompletion]]:
        """The target's completions of other prompts, which select the best weights."""
        return self._references(_all_prompts(self._split_sets[1]))

    def _references(
        self, prompts: list[Prompt]
    ) -> dict[str, list[ReferenceCompletion]]:
        config, generator = self.config.benchmark, self._generator(SINGLE_PROCESS)
        modes = decoding_modes(config.temperature, self.context.seed)
        references = {}
        for name, sampling in modes.items():
            requests = [
                GenerationRequest(
                    prompt.tokens,
                    config.max_tokens,
                    sampling.with_seed_offset(number),
                    generator.stop_tokens,
                )
                for number, prompt in enumerate(prompts)
            ]
            completions = generator.generate(requests)
            references[name] = [
                ReferenceCompletion(
                    self.target.model, request.prompt, tokens, request.sampling
                )
                for request, tokens in zip(requests, completions, strict=True)
            ]
        return references

    @property
    def prompt_sets(self) -> PromptSets:
        """Benchmark prompts of the validation examples, by set."""
        return self._split_sets[0]

    @cached_property
    def _split_sets(self) -> tuple[PromptSets, PromptSets]:
        """Prompts for the benchmark, and others for the selection, if there are any."""
        count = 2 * self.config.benchmark.num_prompts
        sets = self._prompts(prompt_sets, self.context.rows.valid, count)
        benchmark = {name: prompts[::2] for name, prompts in sets.items()}
        selection = {name: prompts[1::2] or prompts for name, prompts in sets.items()}
        return benchmark, selection

    @property
    def benchmark_prompts(self) -> list[Prompt]:
        """The prompts of all sets, in order."""
        return _all_prompts(self.prompt_sets)

    def _prompts(self, select: Callable, rows: Iterable[DataRecord], count: int) -> Any:
        """Prompts that `select` chooses, which leave room for a completion."""
        tokenizer, longest = self.target.tokenizer, self.context.data.max_seq_length
        if positions := config_int(self.target.config, "max_position_embeddings"):
            config = self.config
            new = max(config.data_generation.max_tokens, config.benchmark.max_tokens)
            longest = min(longest, positions - new)
        prompts = select(rows, tokenizer, count=count, max_prompt_tokens=longest)
        if not prompts:
            raise UserError(
                f"no example has a prompt of at most {longest} tokens",
                hint="raise data.max_seq_length, or lower data_generation.max_tokens",
            )
        return prompts

    def _generator(self, ranks: Communicator) -> CachedGenerator:
        model, logger = self.target.model, self.context.logger
        ends = frozenset(self.target.tokenizer.eos_token_ids)
        return CachedGenerator(lambda: model, self.digest, ends, logger, ranks)

    def _completed(self, split: str, count: int) -> list[Example]:
        context, config = self.context, self.config.data_generation
        rows = getattr(context.rows, split)
        prompts = self._prompts(dataset.select_prompts, rows, count)
        context.logger.info(f"{len(prompts):,} prompts for the target to complete")
        completions = dataset.generate_completions(
            prompts, config, self._generator(context.ranks), seed=context.seed
        )
        return dataset.completion_examples(prompts, completions)

    def _batches(self, examples: list[Example]) -> DistillationBatches:
        config, context = self.config.data_generation, self.context
        return DistillationBatches(
            examples,
            self.teacher,
            key=self.digest,
            max_seq_length=context.data.max_seq_length + config.max_tokens,
            tokens=self.config.batch_tokens,
            top_k=config.top_k,
            vocab_size=self._vocab_size,
            seed=context.seed,
            logger=context.logger,
            ranks=context.ranks,
        )

    @cached_property
    def _vocab_size(self) -> int | None:
        """Logits of the draft model, if they are fewer than the target's; else None.

        Models of one tokenizer may have different numbers of unused logits.
        """
        source = self.config.draft_model.init_from
        if source is None:
            return None
        draft = config_int(read_config(self.context.resolve(source)), "vocab_size")
        return draft if draft < config_int(self.target.config, "vocab_size") else None


def _all_prompts(sets: PromptSets) -> list[Prompt]:
    """The prompts of all sets, in order."""
    return [prompt for prompts in sets.values() for prompt in prompts]


def write_initial(
    config: DraftModelConfig,
    context: StageContext,
    target: LoadedModel,
    tokens: mx.array,
) -> Path:
    """The folder of the initial draft model, which is pruned from a model once.

    Args:
        target: the model that will be served.
        tokens: of completions, int32 [1, L], on which the importance of blocks is
            measured.

    Raises:
        UserError: the model to prune has another tokenizer than the target, or no
            engine could serve the pruned one.
    """

    def make(folder: Path) -> None:
        path = context.current.reference
        if config.init_from:
            path = context.resolve(config.init_from)
        source = context.load(path, compute="stored")
        place = str(config.init_from or path)
        require_same_tokenizer(target.tokenizer, source.tokenizer, place=place)
        if "quantization" in source.config:
            source, _ = dequantized_model(source, source.dtype)
        weights = dict(tree_flatten(source.model.parameters()))
        set_compute_dtype(source.model, compute_dtype("auto", source.dtype))
        layers = config.num_layers
        if not isinstance(layers, list):
            count = config.depth(len(source.model.layers))
            order = rank_layers(source.model, tokens)
            layers = most_important_blocks(order, count)
        layers = tuple(sorted(layers))
        pruned = pruned_config(source.config, layers)
        pruned["eos_token_id"] = target.config.get("eos_token_id")
        vocabulary = len(target.tokenizer.get_vocab())
        require_servable(pruned, target.config, vocabulary, place=str(source.path))
        # The target's tokenizer and chat template, whatever the model is pruned from.
        like = replace(source, config=pruned, path=target.path)
        write_model(folder, like, prune(source.model, weights, layers), keeps_mtp=False)
        blocks = ", ".join(map(str, layers))
        context.logger.info(f"initial draft model: blocks {blocks} of {source.path}")

    return context.artifacts.get_or_make(MODELS, INITIAL, make).folder
