"""Time, memory and disk of a quantize stage, estimated from shapes.

The work is that of the tokens that go through the model, with or without gradients, and
of every weight that is solved.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import prod

import mlx.core as mx
import mlx.nn as nn

from ...config.quant_spec import QuantSpec
from ...config.quantize import GPTQConfig, PTQConfig
from ...config.train import chunk_of_many
from ...models.hooks import find_blocks
from ..estimate import active_weights, inputs_and_outputs, logit_bytes, matrix_shapes
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
        """Tokens and weights of all phases."""
        config, held_out = self.config, self.config.calibration.num_eval_tokens
        predicted = self._predicted_tokens
        forward, trained, solves = predicted + 2 * held_out * bool(predicted), 0, 0
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

        weights, block = self._weights, max(self._blocks.values(), default=0)
        logits = 6 * 4 * self._embedding[0]
        phases = [0]
        if self._predicted_tokens or self.config.kv_cache:
            phases.append(4 * weights + logits * LOGIT_POSITIONS)
        if self.config.scale_tuning:
            phases.append(4 * weights + self._tuning_memory)
        if self.config.smoothing:
            # A block in float32, and the hidden states around it.
            states = self._smoothing_tokens * self._embedding[-1]
            phases.append(4 * 2 * (block + states))
        if self._is_sequential:
            named = self._matrices.items()
            outer = [prod(v) for k, v in named if not k.startswith(self._prefix)]
            weights_at_once = (4 + self.dtype.size) * max(block, *outer, 0)
            hessians = 4 * self._width**2 * 8
            phases.append(
                weights_at_once + 12 * 4 * MAX_ELEMENTS + logits * 128 + hessians
            )
        else:
            phases.append(self.dtype.size * weights // 2)
        return int(max(phases))

    @property
    def disk(self) -> int:
        """Temporary bytes: hidden states and layer inputs, and stored predictions."""
        from ...training.teacher_targets import bytes_per_token

        size, hidden = 0, self._embedding[-1]
        if self._is_sequential:
            fisher, compared = self._gptq_tokens
            per_token = 2 * 4 * self._width + 6 * 4 * hidden
            size += (self.num_tokens + compared) * per_token
            size += fisher * 4 * hidden * (len(self._blocks) + 1)
        if tuning := self.config.scale_tuning:
            per_token = bytes_per_token(tuning.top_k, self._embedding[0])
            size += self._predicted_tokens * per_token
        return size

    @property
    def num_tokens(self) -> int:
        """Calibration tokens, if the dataset has them."""
        from ...quantization.ptq.sequential import default_num_tokens

        return self.config.calibration.num_tokens or default_num_tokens(self._width)

    @property
    def _gptq_tokens(self) -> tuple[int, int]:
        """Tokens that go forward and back before the blocks are quantized, and tokens
        of the full-precision stream."""
        from ...quantization.ptq.gptq.gptq import LIMITS
        from ...quantization.ptq.output_fisher import num_fisher_tokens

        config, hidden = self.config, self._embedding[-1]
        if not isinstance(config, GPTQConfig):
            return 0, 0
        limits, outputs = LIMITS[config.effort], [hidden] * config.output_hessian
        most = min(limits.fisher_tokens, self.num_tokens)
        compared = min(limits.compared_tokens, self.num_tokens)
        fisher = num_fisher_tokens([hidden], outputs, most)
        return fisher, compared * config.asymmetric_calibration

    @property
    def _is_sequential(self) -> bool:
        """Whether blocks are quantized one by one, with calibration tokens."""
        return self.config.method != "rtn" and bool(self._blocks)

    @cached_property
    def _prefix(self) -> str:
        blocks = find_blocks(self.model)
        return blocks.prefix if blocks else " "

    @cached_property
    def _blocks(self) -> Counter[str]:
        """Weights of each block that are quantized."""
        sizes = Counter()
        for path in self.specs:
            if path.startswith(self._prefix):
                index = path.removeprefix(self._prefix).partition(".")[0]
                sizes[index] += prod(self._matrices[f"{path}.weight"])
        return sizes

    @property
    def _smoothing_tokens(self) -> int:
        from ...quantization.ptq.smoothquant import smoothquant

        return self.config.calibration.num_tokens or smoothquant.NUM_TOKENS

    @property
    def _tuning_memory(self) -> int:
        """Bytes of a backward pass of scale tuning, besides the model."""
        from .refinement import TRAINED_TOKENS_AT_ONCE

        vocabulary = self._embedding[0]
        tokens = min(self.config.scale_tuning.batch_tokens, TRAINED_TOKENS_AT_ONCE)
        values = inputs_and_outputs(self.experts, self._matrices)
        chunk = chunk_of_many(vocabulary, tokens)
        return 4 * tokens * values + logit_bytes(vocabulary, tokens, chunk)

    @property
    def _predicted_tokens(self) -> int:
        """Tokens whose predictions are stored, to compare or to tune with."""
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
        from ...quantization.mixed_precision import kv_bits

        candidates = set(self.config.kv_cache.candidate_bits)
        bits = sum(b != kv_bits.UNQUANTIZED for b in candidates)
        tokens = 1 + bits * len(make_cache(self.model))
        held_out = (2 + bits) * self.config.calibration.num_eval_tokens
        return tokens * kv_bits.CALIBRATION_TOKENS + held_out

    @cached_property
    def _matrices(self) -> dict[str, tuple[int, ...]]:
        return matrix_shapes(self.model)

    @property
    def _weights(self) -> int:
        return sum(map(prod, self._matrices.values()))

    @property
    def _width(self) -> int:
        return max(shape[-1] for shape in self._matrices.values())

    @cached_property
    def _embedding(self) -> tuple[int, ...]:
        """Shape of the largest matrix outside the blocks, [vocabulary, hidden]."""
        embeddings = [v for k, v in self._matrices.items() if "embed" in k]
        return max(embeddings, key=prod, default=(0, self._width))
