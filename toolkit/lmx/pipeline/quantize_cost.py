"""Time, memory and disk of a quantize stage, estimated from shapes.

The unit of work is one floating-point operation of a large matrix product, as in
`quantization/ptq/cost.py`, which counts the calibrated methods. Around them:

    predictions  a forward pass with logits for every token of the evaluation and of
                 scale tuning, by the full-precision model
    candidates   a forward pass with logits over the evaluation tokens for each
    tuning       a forward and a backward pass for every token of every step, of the
                 probe of the learning rate too
    smoothing    a forward pass for every token of the search for scales
    search       mixed precision: both passes over its tokens, and one plan after the
                 other over its held-out tokens
    KV cache     a forward pass with logits for every layer and number of bits, and over
                 the held-out tokens for every candidate
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import mlx.core as mx
import mlx.nn as nn

from ..config.quant_spec import QuantSpec
from ..config.quantize import GPTQConfig, PTQConfig
from ..config.train import chunk_of_many
from ..cpu import on_cpu
from .estimate import CHUNKS_AT_ONCE, LOGIT_BYTES, inputs_and_outputs, matrix_shapes

# Work on one token relative to the products of its forward pass: without gradients, and
# with those of scales and biases.
FORWARD, FORWARD_BACKWARD = 2.0, 8.0
# Work per weight of rounding to nearest, with reading and writing.
RTN_WORK = 2e4
# Evaluations within scale tuning, each over all evaluation tokens.
TUNING_EVALUATIONS = 9
# Plans that a mixed-precision search compares, and work per weight of their grids.
PLANS, GRID_WORK = 6, 5e5


@dataclass(frozen=True)
class QuantizeCost:
    """Estimates for one quantize block.

    Attributes:
        model: only the shapes of its weights are used.
        specs: quantization grid by path of each layer to quantize.
        dtype: dtype that the checkpoint stores.
        experts: of a mixture, that a token sees; 0 = all. For the memory alone.
    """

    config: PTQConfig
    model: nn.Module
    specs: dict[str, QuantSpec]
    dtype: mx.Dtype
    experts: int = 0

    @property
    def work(self) -> float:
        """Operations of the whole stage."""
        total = RTN_WORK * self._weights
        if self.sequential:
            total += self.sequential.total
        if self.config.smoothing:
            total += self.smoothing
        if self.config.mixed_precision:
            total += self._search
        if self.config.kv_cache:
            total += self._kv_search
        return total + self._refinement

    @property
    def memory(self) -> int:
        """Peak bytes of arrays: the largest phase's."""
        from ..quantization.ptq.gptq_solver import MAX_ELEMENTS
        from ..training.teacher_cache import LOGIT_POSITIONS

        size = self._weights
        stored = self.dtype.size * size
        refined = 0
        if self._tokens_of_refinement or self.config.kv_cache:
            refined = 4 * size + 6 * 4 * self._vocabulary * LOGIT_POSITIONS
        if self.config.scale_tuning:
            refined = max(refined, 4 * size + self._tuning_memory)
        if self.config.smoothing:
            refined = max(refined, self._smoothing_memory)
        if self.sequential is None:
            return max(stored // 2, refined)
        largest = max((max(self.sequential.solved), self.sequential.head_weights))
        blocks = (4 + self.dtype.size) * largest + 12 * 4 * MAX_ELEMENTS
        logits = 6 * 4 * self._vocabulary * 128
        return int(max(blocks + logits + 4 * self._width**2 * 8, refined))

    @property
    def disk(self) -> int:
        """Temporary bytes: hidden states and layer inputs, and stored predictions."""
        from ..training.teacher_targets import bytes_per_token

        size = 0
        if self.sequential:
            per_token = 2 * 4 * self._width + 6 * 4 * self._hidden
            size += (self.num_tokens + self.sequential.compared_tokens) * per_token
            hidden = 4 * self._hidden * (len(self.sequential.solved) + 1)
            size += self.sequential.fisher_tokens * hidden
        if tuning := self.config.scale_tuning:
            per_token = bytes_per_token(tuning.top_k, self._vocabulary)
            size += self._tokens_of_refinement * per_token
        return size

    @property
    def num_tokens(self) -> int:
        """Calibration tokens, if the dataset has them."""
        from ..quantization.ptq.sequential import default_num_tokens

        return self.config.calibration.num_tokens or default_num_tokens(self._width)

    @cached_property
    def sequential(self):
        """`SequentialCost` of a calibrated method; None for RTN."""
        from ..quantization.ptq.gptq import LIMITS
        from ..quantization.ptq.output_fisher import num_fisher_tokens

        config = self.config
        if not isinstance(config, GPTQConfig):
            return None
        limits = LIMITS[config.effort]
        outputs = [self._hidden] if config.output_hessian else []
        fisher = num_fisher_tokens([self._hidden], outputs, limits.fisher_tokens)
        compared = limits.compared_tokens if config.asymmetric_calibration else 0
        return self._sequential_cost(
            tokens=self.num_tokens,
            fisher_tokens=min(fisher, self.num_tokens),
            compared_tokens=min(compared, self.num_tokens),
            refine_iters=config.refine_iters,
        )

    def _sequential_cost(self, **counts: int):
        from ..quantization.ptq.cost import SequentialCost

        names = ("tokens", "fisher_tokens", "compared_tokens", "refine_iters")
        counts = dict.fromkeys(names, 0) | counts
        return SequentialCost.of(self.model, self.specs, **counts)

    @property
    def smoothing(self) -> float:
        """Operations of a search for the scales of SmoothQuant."""
        return self._passes(self._smoothing_tokens, FORWARD)

    @property
    def _smoothing_tokens(self) -> int:
        from ..quantization.ptq import smoothquant

        return self.config.calibration.num_tokens or smoothquant.NUM_TOKENS

    @property
    def _smoothing_memory(self) -> int:
        """Bytes of a block in float32, and of the hidden states around it."""
        blocks = self._sequential_cost()
        block = max(blocks.solved) if blocks else 0
        return 4 * (2 * block + 2 * self._smoothing_tokens * self._hidden)

    @property
    def _tuning_memory(self) -> int:
        """Bytes of a backward pass of scale tuning, besides the model."""
        from .ptq_refinement import TRAINED_TOKENS_AT_ONCE

        tokens = min(self.config.scale_tuning.batch_tokens, TRAINED_TOKENS_AT_ONCE)
        values = inputs_and_outputs(self.experts, self._matrices)
        at_once = tokens
        if chunk := chunk_of_many(self._vocabulary, tokens):
            at_once = min(tokens, CHUNKS_AT_ONCE * chunk)
        size = 4 * tokens * values
        return size + LOGIT_BYTES[on_cpu()] * self._vocabulary * at_once

    @property
    def _refinement(self) -> float:
        config, held_out = self.config, self.config.calibration.num_eval_tokens
        tuning = config.scale_tuning
        rolls_back = config.compares_with_rtn
        if not (tuning or rolls_back):
            return 0.0
        passes = 2 + rolls_back
        trained = 0
        if tuning:
            passes += TUNING_EVALUATIONS
            trained = tuning.steps * tuning.batch_tokens
        predicted = self._tokens_of_refinement
        work = self._passes(predicted + passes * held_out, FORWARD)
        return work + self._passes(trained, FORWARD_BACKWARD)

    @property
    def _tokens_of_refinement(self) -> int:
        """Tokens whose predictions are stored."""
        config, tuning = self.config, self.config.scale_tuning
        rolls_back = config.compares_with_rtn
        if not (tuning or rolls_back):
            return 0
        held_out = config.calibration.num_eval_tokens
        if not tuning:
            return held_out
        wanted = tuning.steps * tuning.batch_tokens
        return held_out + min(config.calibration.num_tokens or wanted, wanted)

    @property
    def _search(self) -> float:
        from ..quantization.mixed_precision import search

        work = self._passes(search.CALIBRATION_TOKENS, FORWARD_BACKWARD)
        work += self._passes(PLANS * search.HELD_OUT_TOKENS, FORWARD)
        return work + GRID_WORK * self._weights

    @property
    def _kv_search(self) -> float:
        from ..models.loader import make_cache
        from ..quantization.mixed_precision.kv_bits import (
            CALIBRATION_TOKENS,
            UNQUANTIZED,
        )

        bits = sum(b != UNQUANTIZED for b in set(self.config.kv_cache.candidate_bits))
        tokens = (1 + bits * len(make_cache(self.model))) * CALIBRATION_TOKENS
        tokens += (2 + bits) * self.config.calibration.num_eval_tokens
        return self._passes(tokens, FORWARD)

    def _passes(self, tokens: float, factor: float) -> float:
        return factor * 2 * self._weights * tokens

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
        return max(
            (shape for name, shape in self._matrices.items() if "embed" in name),
            key=prod,
            default=(0, self._width),
        )

    @property
    def _vocabulary(self) -> int:
        return self._embedding[0]

    @property
    def _hidden(self) -> int:
        return self._embedding[-1]
