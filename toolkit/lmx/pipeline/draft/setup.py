"""What the distillation of a draft model starts from: its data and its weights."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from ...config.draft import DraftConfig, DraftModelConfig
from ...data.tokenization import Example
from ...data.tokenizer_files import require_same_tokenizer
from ...draft import dataset
from ...draft.acceptance import ReferenceCompletion
from ...draft.benchmark import decoding_modes, with_seed_offset
from ...draft.dataset import DistillationBatches, Prompt, PromptSets, prompt_sets
from ...draft.pruning import most_important_blocks, prune, pruned_config
from ...draft.report import require_servable
from ...errors import UserError
from ...generation.completions import CachedGenerator
from ...generation.sequence import GenerationRequest
from ...generation.speculative.layer_skip import rank_layers
from ...models.checkpoint import config_int, read_config
from ...models.loader import LoadedModel, compute_dtype, set_compute_dtype
from ...quantization.packing import dequantized_model
from ...run import fs
from ..context import StageContext, is_complete, mark_complete, write_model
from ..estimate import DEPTH_FRACTIONS

# The folder of the initial draft model, in that of the stage.
INITIAL_FOLDER = "initial"


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
        """Complete the prompts on the first rank; all ranks get the completions."""
        config = self.config.data_generation
        self._train_examples = self._completed("train", config.num_prompts)
        self._eval_examples = self._completed("valid", config.num_eval_prompts)

    @cached_property
    def train_batches(self) -> DistillationBatches:
        """Completions of the training prompts, with the target's predictions."""
        return self._batches(self._train_examples)

    @cached_property
    def eval_batches(self) -> DistillationBatches:
        """The same of the validation prompts."""
        return self._batches(self._eval_examples)

    @cached_property
    def references(self) -> dict[str, list[ReferenceCompletion]]:
        """The target's completions of the benchmark prompts, by decoding mode."""
        config, generator = self.config.benchmark, self._generator
        modes = decoding_modes(config.temperature, self.context.seed)
        references = {}
        for name, sampling in modes.items():
            requests = [
                GenerationRequest(
                    prompt.tokens,
                    config.max_tokens,
                    with_seed_offset(sampling, number),
                    generator.stop_tokens,
                )
                for number, prompt in enumerate(self.benchmark_prompts)
            ]
            completions = generator.generate(requests)
            references[name] = [
                ReferenceCompletion(
                    self.target.model, request.prompt, tokens, request.sampling
                )
                for request, tokens in zip(requests, completions, strict=True)
            ]
        return references

    @cached_property
    def prompt_sets(self) -> PromptSets:
        """Benchmark prompts of the validation examples, by set."""
        rows, count = self.context.rows.valid, self.config.benchmark.num_prompts
        tokenizer, longest = self.target.tokenizer, self._max_prompt_tokens
        prompts = prompt_sets(rows, tokenizer, count=count, max_prompt_tokens=longest)
        self._require_prompts(prompts)
        return prompts

    @property
    def benchmark_prompts(self) -> list[Prompt]:
        """The prompts of all sets, in order."""
        return [prompt for prompts in self.prompt_sets.values() for prompt in prompts]

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end a completion."""
        return frozenset(self.target.tokenizer.eos_token_ids)

    def _select_prompts(self, rows, count: int) -> list[Prompt]:
        tokenizer, longest = self.target.tokenizer, self._max_prompt_tokens
        prompts = dataset.select_prompts(
            rows, tokenizer, count=count, max_prompt_tokens=longest
        )
        self._require_prompts(prompts)
        return prompts

    def _require_prompts(self, prompts) -> None:
        if not prompts:
            raise UserError(
                f"no example has a prompt of at most {self._max_prompt_tokens} tokens",
                hint="raise data.max_seq_length, or lower data_generation.max_tokens",
            )

    @property
    def _max_prompt_tokens(self) -> int:
        """Tokens of a prompt that leaves room for its completion."""
        longest = self.context.data.max_seq_length
        if positions := config_int(self.target.config, "max_position_embeddings"):
            config = self.config
            new = max(config.data_generation.max_tokens, config.benchmark.max_tokens)
            longest = min(longest, positions - new)
        return longest

    @property
    def _generator(self) -> CachedGenerator:
        model = self.target.model
        return CachedGenerator(
            lambda: model, self.digest, self.stop_tokens, self.context.logger
        )

    def _completed(self, split: str, count: int) -> list[Example]:
        context, config = self.context, self.config.data_generation
        ranks = context.ranks
        with ranks.collective_errors():
            prompts = self._select_prompts(getattr(context.rows, split), count)
            completions = None
            if ranks.is_first:
                context.logger.info(
                    f"{len(prompts):,} prompts for the target to complete"
                )
                completions = dataset.generate_completions(
                    prompts, config, self._generator, seed=context.seed
                )
        # Another machine's rounding may give other tokens.
        completions = ranks.broadcast_object(completions)
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


class DraftInitializer:
    """Makes the initial draft model, pruned from a model.

    Args:
        target: the model that will be served.
        tokens: of completions, int32 [1, L], on which the importance of blocks is
            measured.

    Raises:
        UserError: the model to prune has another tokenizer than the target.
    """

    def __init__(
        self,
        config: DraftModelConfig,
        context: StageContext,
        target: LoadedModel,
        tokens: mx.array,
    ):
        self.config = config
        self.context = context
        self.target = target
        self.tokens = tokens
        self.source = self._load_source()
        self.weights = dict(tree_flatten(self.source.model.parameters()))
        compute = compute_dtype("auto", self.source.dtype)
        set_compute_dtype(self.source.model, compute)

    def init(self, predict_speedup: Callable[[Path], float]) -> Path:
        """The folder of the initial draft model, which is made once.

        Args:
            predict_speedup: the predicted speed-up of the model in a folder.
        """
        folder = self.context.folder / INITIAL_FOLDER
        if is_complete(folder, self.context.logger.warning):
            return folder
        self._write(folder, self._best_layers(predict_speedup))
        mark_complete(folder)
        return folder

    def _best_layers(self, predict_speedup: Callable[[Path], float]) -> tuple[int, ...]:
        candidates = self._candidates()
        if len(candidates) == 1:
            return candidates[0]
        speedups = {}
        for layers in candidates:
            name = f"candidate-{len(layers)}"
            candidate = self._write(self.context.folder / name, layers)
            speedups[layers] = predict_speedup(candidate)
            fs.remove(candidate)
        best = max(speedups, key=speedups.get)
        by_depth = ", ".join(f"{len(n)}: {v:.2f}x" for n, v in speedups.items())
        self.context.logger.info(
            f"predicted speed-up by number of blocks: {by_depth}; selected {len(best)}"
        )
        return best

    def _load_source(self) -> LoadedModel:
        """The model to prune, dequantized, in its stored dtype."""
        context, name = self.context, self.config.init_from
        path = context.resolve(name) if name else context.current.reference
        loaded = context.load(path, compute="stored")
        require_same_tokenizer(
            self.target.tokenizer,
            loaded.tokenizer,
            role="draft",
            place=str(name or path),
        )
        if "quantization" in loaded.config:
            loaded, _ = dequantized_model(loaded, loaded.dtype)
        return loaded

    def _candidates(self) -> list[tuple[int, ...]]:
        """The choices of blocks to keep, each ascending."""
        wanted, count = self.config.num_layers, len(self.source.model.layers)
        if isinstance(wanted, list):
            return [tuple(sorted(wanted))]
        counts = [wanted]
        if wanted == "auto":
            counts = sorted({max(1, math.ceil(f * count)) for f in DEPTH_FRACTIONS})
        if max(counts) >= count:
            return [tuple(range(count))]
        order = rank_layers(self.source.model, self.tokens)
        return [most_important_blocks(order, n) for n in counts]

    def _write(self, folder: Path, layers: tuple[int, ...]) -> Path:
        source = self.source
        config = pruned_config(source.config, layers)
        config["eos_token_id"] = self.target.config.get("eos_token_id")
        tokens = len(self.target.tokenizer.get_vocab())
        require_servable(config, self.target.config, tokens, place=str(source.path))
        weights = prune(source.model, self.weights, layers)
        # The target's tokenizer and chat template, whatever the model is pruned from.
        like = replace(source, config=config, path=self.target.path)
        write_model(folder, like, weights, keeps_mtp=False)
        blocks = ", ".join(map(str, layers))
        self.context.logger.info(
            f"initial draft model: blocks {blocks} of {source.path}"
        )
        return folder
