"""Time, memory and disk of a quantize stage, estimated from shapes.

Its phases run one after the other: their work adds up, and the largest one decides
about memory. The work is that of the tokens that go through the model, with or without
gradients, and of every weight that is solved.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import mlx.core as mx
import mlx.nn as nn

from ...config.quant_spec import QuantSpec
from ...config.quantize import TUNING_TOP_K, GPTQConfig, PTQConfig
from ...config.train import chunk_of_many
from ...models.hooks import find_blocks
from ..estimate import active_weights, inputs_and_outputs, logit_bytes, matrix_shapes
from ..work import Work

# Evaluations within scale tuning, each over all evaluation tokens.
TUNING_EVALUATIONS = 9
# Plans that a mixed-precision search compares, and grids of a weight that it solves.
PLANS, GRIDS = 6, 16


@dataclass(frozen=True)
class Phase:
    """Bytes of memory and disk, tokens that go forward, or forward and back, and how
    often every weight is solved."""

    memory: float = 0
    disk: int = 0
    forward: int = 0
    trained: int = 0
    solves: int = 0


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
        """The work of all phases."""
        per_token = 2 * active_weights(self.experts, self._matrices)
        phases = self._phases
        return Work(
            trained=3 * per_token * sum(phase.trained for phase in phases),
            forward=per_token * sum(phase.forward for phase in phases),
            solved=self._weights * sum(phase.solves for phase in phases),
        )

    @property
    def memory(self) -> int:
        """Peak bytes of arrays."""
        return int(max(phase.memory for phase in self._phases))

    @property
    def disk(self) -> int:
        """Bytes of temporary files: hidden states, layer inputs and predictions."""
        return sum(phase.disk for phase in self._phases)

    @cached_property
    def _phases(self) -> list[Phase]:
        return [*self._before(), self._method(), *self._after()]

    def _before(self) -> Iterator[Phase]:
        """What changes the weights or the grids of the method."""
        config = self.config
        if config.smoothing:
            from ...quantization.ptq.smoothquant import smoothquant

            tokens = config.calibration.num_tokens or smoothquant.NUM_TOKENS
            # A block in float32, and the hidden states around it.
            values = max(self._blocks.values(), default=0) + tokens * self._hidden
            yield Phase(4 * 2 * values, forward=tokens)
        if config.mixed_precision:
            from ...quantization.mixed_precision import search

            held_out = PLANS * search.HELD_OUT_TOKENS
            tokens = search.CALIBRATION_TOKENS
            yield Phase(trained=tokens, forward=held_out, solves=GRIDS)

    def _method(self) -> Phase:
        """Rounding, or the calibration of block by block."""
        from ...quantization.ptq.gptq.gptq import COMPARED_TOKENS, GPTQ
        from ...quantization.ptq.gptq.solver import MAX_ELEMENTS
        from ...quantization.ptq.output_fisher import num_fisher_tokens
        from ...quantization.ptq.sequential import default_num_tokens

        config, hidden = self.config, self._hidden
        if config.method == "rtn" or not self._blocks:
            return Phase(self.dtype.size * self._weights // 2)
        matrices = self._matrices
        width = max(shape[-1] for shape in matrices.values())
        tokens = config.calibration.num_tokens or default_num_tokens(width)
        # Tokens that go forward and back before the blocks are quantized, and tokens
        # of the full-precision stream.
        fisher = compared = solves = 0
        if isinstance(config, GPTQConfig):
            outputs = [hidden] * config.output_hessian
            most = min(GPTQ.max_fisher_tokens, tokens)
            fisher = num_fisher_tokens([hidden], outputs, most)
            compared = min(COMPARED_TOKENS[config.effort], tokens)
            compared *= config.asymmetric_calibration
            solves = 1 + config.refine_iters
        outer = [prod(v) for k, v in matrices.items() if not k.startswith(self._prefix)]
        largest = max(*self._blocks.values(), *outer, 0)
        return Phase(
            (4 + self.dtype.size) * largest
            + 12 * 4 * MAX_ELEMENTS
            + self._logits(128)
            + 4 * width**2 * 8,
            disk=(tokens + compared) * (2 * 4 * width + 6 * 4 * hidden)
            + fisher * 4 * hidden * (len(self._blocks) + 1),
            # Through the full-precision block, then the quantized one.
            forward=2 * tokens + compared,
            trained=fisher,
            solves=solves,
        )

    def _after(self) -> Iterator[Phase]:
        """Scale tuning, the choice between candidates, and the bits of the KV cache."""
        from ...training.teacher_cache import logit_positions
        from ...training.teacher_targets import bytes_per_token

        config, tuning = self.config, self.config.scale_tuning
        held_out, model = config.calibration.num_eval_tokens, 4 * self._weights
        predictions = model + self._logits(logit_positions())
        if tuning:
            wanted = tuning.steps * tuning.batch_tokens
            stored = min(config.calibration.num_tokens or wanted, wanted)
            forward = TUNING_EVALUATIONS * held_out + stored
            size = bytes_per_token(TUNING_TOP_K, self._embedding[0])
            disk, memory = (held_out + stored) * size, model + self._tuning_memory
            yield Phase(memory, disk, forward=forward, trained=wanted)
        if tuning or config.compares_with_rtn:
            yield Phase(predictions, forward=3 * held_out)
        if config.kv_cache:
            yield Phase(predictions, forward=self._kv_tokens)

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
    def _tuning_memory(self) -> int:
        """Bytes of a backward pass of scale tuning, besides the model."""
        from .refinement import TRAINED_TOKENS_AT_ONCE

        vocabulary = self._embedding[0]
        tokens = min(self.config.scale_tuning.batch_tokens, TRAINED_TOKENS_AT_ONCE)
        values = inputs_and_outputs(self.experts, self._matrices)
        chunk = chunk_of_many(vocabulary, tokens)
        return 4 * tokens * values + logit_bytes(vocabulary, tokens, chunk)

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

    @cached_property
    def _embedding(self) -> tuple[int, ...]:
        """Shape of the largest matrix outside the blocks, [vocabulary, hidden]."""
        matrices = self._matrices
        embeddings = [shape for name, shape in matrices.items() if "embed" in name]
        width = max(shape[-1] for shape in matrices.values())
        return max(embeddings, key=prod, default=(0, width))

    @property
    def _hidden(self) -> int:
        return self._embedding[-1]

    def _logits(self, tokens: int) -> int:
        """Bytes of the predictions of two models for these tokens."""
        return 6 * 4 * self._embedding[0] * tokens
