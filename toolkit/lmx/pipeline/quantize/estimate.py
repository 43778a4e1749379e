"""Time, memory and disk of a quantize stage, estimated from shapes.

The work is that of the tokens that go through the model, with or without gradients, and
of every weight that is solved.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import mlx.core as mx
import mlx.nn as nn

from ...config.quant_spec import QuantSpec
from ...config.quantize import GPTQConfig, PTQConfig
from ...config.train import chunk_of_many
from ...cpu import on_cpu
from ...models.hooks import find_blocks
from ..estimate import (
    CHUNKS_AT_ONCE,
    LOGIT_BYTES,
    active_weights,
    inputs_and_outputs,
    matrix_shapes,
)
from ..work import Work

# Evaluations within scale tuning, each over all evaluation tokens.
TUNING_EVALUATIONS = 9
# Plans that a mixed-precision search compares, and grids of a weight that it solves.
PLANS, GRIDS = 6, 16


@dataclass(frozen=True)
class QuantizeCost:
    """Estimates for one quantize block.

    Attributes:
        model: only the shapes of its weights are used.
        specs: quantization grid by path of each layer to quantize.
        dtype: dtype that the checkpoint stores.
        experts: of a mixture, that a token sees; 0 = all.
    """

    config: PTQConfig
    model: nn.Module
    specs: dict[str, QuantSpec]
    dtype: mx.Dtype
    experts: int = 0

    @property
    def work(self) -> Work:
        config, held_out = self.config, self.config.calibration.num_eval_tokens
        refined = self._tokens_of_refinement
        forward, trained, solves = refined + 2 * held_out * bool(refined), 0, 0
        if self._is_sequential:
            # Through the full-precision block, then the quantized one.
            fisher, compared = self._gptq_tokens
            forward += 2 * self.num_tokens + compared
            trained += fisher
        if isinstance(config, GPTQConfig):
            solves += 1 + config.refine_iters
        if config.smoothing:
            forward += self._smoothing_tokens
        if tuning := config.scale_tuning:
            forward += TUNING_EVALUATIONS * held_out
            trained += tuning.steps * tuning.batch_tokens
        if config.mixed_precision:
            from ...quantization.mixed_precision import search

            trained += search.CALIBRATION_TOKENS
            forward += PLANS * search.HELD_OUT_TOKENS
            solves += GRIDS
        if config.kv_cache:
            forward += self._kv_tokens
        per_token = 2 * active_weights(self.experts, self._matrices)
        return Work(
            trained=3 * per_token * trained,
            forward=per_token * forward,
            solved=solves * self._weights,
        )

    @property
    def memory(self) -> int:
        """Peak bytes of arrays: the largest phase's."""
        from ...quantization.ptq.gptq.solver import MAX_ELEMENTS
        from ...training.teacher_cache import LOGIT_POSITIONS

        size = self._weights
        stored = self.dtype.size * size
        refined = 0
        if self._tokens_of_refinement or self.config.kv_cache:
            refined = 4 * size + 6 * 4 * self._embedding[0] * LOGIT_POSITIONS
        if self.config.scale_tuning:
            refined = max(refined, 4 * size + self._tuning_memory)
        if self.config.smoothing:
            # A block in float32, and the hidden states around it.
            block = max(self._block_sizes, default=0)
            states = self._smoothing_tokens * self._hidden
            refined = max(refined, 4 * 2 * (block + states))
        if not self._is_sequential:
            return max(stored // 2, refined)
        outer = [p for n, p in self._sizes.items() if not n.startswith(self._prefix)]
        largest = max(*self._block_sizes, *outer, 0)
        blocks = (4 + self.dtype.size) * largest + 12 * 4 * MAX_ELEMENTS
        logits = 6 * 4 * self._embedding[0] * 128
        return int(max(blocks + logits + 4 * self._width**2 * 8, refined))

    @property
    def disk(self) -> int:
        """Temporary bytes: hidden states and layer inputs, and stored predictions."""
        from ...training.teacher_targets import bytes_per_token

        size = 0
        if self._is_sequential:
            fisher, compared = self._gptq_tokens
            per_token = 2 * 4 * self._width + 6 * 4 * self._hidden
            size += (self.num_tokens + compared) * per_token
            size += fisher * 4 * self._hidden * (len(self._block_sizes) + 1)
        if tuning := self.config.scale_tuning:
            per_token = bytes_per_token(tuning.top_k, self._embedding[0])
            size += self._tokens_of_refinement * per_token
        return size

    @property
    def num_tokens(self) -> int:
        """Calibration tokens, if the dataset has them."""
        from ...quantization.ptq.sequential import default_num_tokens

        return self.config.calibration.num_tokens or default_num_tokens(self._width)

    @cached_property
    def _gptq_tokens(self) -> tuple[int, int]:
        """Tokens that go forward and back before the blocks are quantized, and tokens
        of the full-precision stream."""
        from ...quantization.ptq.gptq.gptq import LIMITS
        from ...quantization.ptq.output_fisher import num_fisher_tokens

        config = self.config
        if not isinstance(config, GPTQConfig):
            return 0, 0
        limits, outputs = LIMITS[config.effort], [self._hidden] * config.output_hessian
        most = min(limits.fisher_tokens, self.num_tokens)
        fisher = num_fisher_tokens([self._hidden], outputs, most)
        compared = min(limits.compared_tokens, self.num_tokens)
        return fisher, compared * config.asymmetric_calibration

    @property
    def _is_sequential(self) -> bool:
        """Whether blocks are quantized one by one, with calibration tokens."""
        return self.config.method != "rtn" and bool(self._block_sizes)

    @cached_property
    def _prefix(self) -> str:
        blocks = find_blocks(self.model)
        return blocks.prefix if blocks else " "

    @cached_property
    def _block_sizes(self) -> list[int]:
        """Weights of each block that are quantized."""
        sizes: dict[str, int] = {}
        for path in self.specs:
            if path.startswith(self._prefix):
                index = path.removeprefix(self._prefix).partition(".")[0]
                sizes[index] = sizes.get(index, 0) + self._sizes[f"{path}.weight"]
        return list(sizes.values())

    @property
    def _smoothing_tokens(self) -> int:
        from ...quantization.ptq.smoothquant import smoothquant

        return self.config.calibration.num_tokens or smoothquant.NUM_TOKENS

    @property
    def _tuning_memory(self) -> int:
        """Bytes of a backward pass of scale tuning, besides the model."""
        from .refinement import TRAINED_TOKENS_AT_ONCE

        tokens = min(self.config.scale_tuning.batch_tokens, TRAINED_TOKENS_AT_ONCE)
        values = inputs_and_outputs(self.experts, self._matrices)
        chunk = chunk_of_many(self._embedding[0], tokens) or tokens
        at_once = min(tokens, CHUNKS_AT_ONCE * chunk)
        logits = LOGIT_BYTES[on_cpu()] * self._embedding[0] * at_once
        return 4 * tokens * values + logits

    @property
    def _tokens_of_refinement(self) -> int:
        """Tokens whose predictions are stored."""
        config, tuning = self.config, self.config.scale_tuning
        held_out = config.calibration.num_eval_tokens
        if not tuning:
            return held_out * config.compares_with_rtn
        wanted = tuning.steps * tuning.batch_tokens
        return held_out + min(config.calibration.num_tokens or wanted, wanted)

    @property
    def _kv_tokens(self) -> int:
        """Tokens of the passes for every layer, number of bits and candidate."""
        from ...models.loader import make_cache
        from ...quantization.mixed_precision.kv_bits import (
            CALIBRATION_TOKENS,
            UNQUANTIZED,
        )

        bits = sum(b != UNQUANTIZED for b in set(self.config.kv_cache.candidate_bits))
        tokens = (1 + bits * len(make_cache(self.model))) * CALIBRATION_TOKENS
        return tokens + (2 + bits) * self.config.calibration.num_eval_tokens

    @cached_property
    def _matrices(self) -> dict[str, tuple[int, ...]]:
        return matrix_shapes(self.model)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {name: prod(shape) for name, shape in self._matrices.items()}

    @property
    def _weights(self) -> int:
        return sum(self._sizes.values())

    @property
    def _width(self) -> int:
        return max(shape[-1] for shape in self._matrices.values())

    @cached_property
    def _embedding(self) -> tuple[int, ...]:
        """Shape of the largest matrix outside the blocks, [vocabulary, hidden]."""
        return max(
            (shape for name, shape in self._matrices.items() if "embed" in name),
            key=prod,
            default=(0, self._width),
        )

    @property
    def _hidden(self) -> int:
        return self._embedding[-1]
