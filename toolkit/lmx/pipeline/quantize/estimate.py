"""Memory, disk and work of a quantization, from shapes alone.

Its phases run one after the other: their work and their files add up, and the largest
one decides about memory.
"""

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from ...config.quant_spec import QuantSpec
from ...config.quantize import TUNING_TOP_K, AWQConfig, PTQConfig
from ...config.train import chunk_of_many
from ...models.hooks import find_blocks
from ..estimate import (
    GRIDS,
    HESSIANS,
    PLANS,
    PREDICTED,
    PREDICTION_ARRAYS,
    SOLVER_ARRAYS,
    TUNING_EVALUATIONS,
    ModelShape,
    logit_bytes,
)
from ..work import Work


class Phase(NamedTuple):
    """Bytes of memory and of files, tokens that go forward, or forward and back, and
    how often every weight is solved."""

    memory: float = 0
    disk: int = 0
    forward: int = 0
    trained: int = 0
    solves: int = 0


class Sizes:
    """Numbers of weights, and widths.

    Attributes:
        blocks: weights of each block that are quantized.
        largest: weights of the largest of these, or of a matrix outside of blocks.
        width: of the widest matrix.
    """

    def __init__(self, shape: ModelShape, specs: dict[str, QuantSpec]):
        matrices, blocks = shape.matrices, find_blocks(shape.model())
        prefix = blocks.prefix if blocks else " "
        self.blocks = Counter()
        for path in specs:
            if path.startswith(prefix):
                index = path.removeprefix(prefix).partition(".")[0]
                self.blocks[index] += prod(matrices[f"{path}.weight"])
        outer = [prod(v) for k, v in matrices.items() if not k.startswith(prefix)]
        self.largest = max(*self.blocks.values(), *outer, 0)
        self.weights = sum(map(prod, matrices.values()))
        self.width = max(size[-1] for size in matrices.values())
        embeddings = [size for name, size in matrices.items() if "embed" in name]
        default = (0, self.width)
        self.vocabulary, self.hidden = max(embeddings, key=prod, default=default)

    def predictions(self, tokens: int) -> int:
        """Bytes of the predictions of two models for these tokens."""
        return 4 * PREDICTION_ARRAYS * self.vocabulary * tokens


def quantize_cost(
    config: PTQConfig, shape: ModelShape, specs: dict[str, QuantSpec]
) -> tuple[int, int, Work]:
    """Peak bytes of arrays, bytes of temporary files, and work.

    Args:
        specs: quantization grid by path of each layer to quantize.
    """
    sizes = Sizes(shape, specs)
    phases = [*_phases(config, shape, sizes)]
    disk, forward, trained, solves = map(sum, list(zip(*phases, strict=True))[1:])
    per_token = 2 * shape.active_weights
    work = Work(
        trained=3 * per_token * trained,
        forward=per_token * forward,
        solved=sizes.weights * solves,
    )
    return int(max(phase.memory for phase in phases)), disk, work


def _phases(config: PTQConfig, shape: ModelShape, sizes: Sizes) -> Iterator[Phase]:
    # These need NumPy, which reading a recipe does not load.
    from ...models.loader import make_cache
    from ...quantization.mixed_precision import kv_bits, search
    from ...quantization.ptq import sequential
    from ...quantization.ptq.channel_scales import channel_scales
    from ...quantization.ptq.gptq import gptq
    from ...quantization.ptq.gptq.solver import MAX_ELEMENTS
    from ...quantization.ptq.output_fisher import num_fisher_tokens
    from ...training.teacher_cache import logit_positions
    from ...training.teacher_targets import bytes_per_token
    from .refinement import TRAINED_TOKENS_AT_ONCE

    calibration, vocabulary = config.calibration, sizes.vocabulary
    is_awq = isinstance(config, AWQConfig)
    for searches in [False] * bool(config.smoothing) + [True] * is_awq:
        # Blocks in float32, and the hidden states around one. AWQ compares the outputs
        # for every power, mostly at four places.
        tokens = calibration.num_tokens or channel_scales.NUM_TOKENS
        block = max(sizes.blocks.values(), default=0)
        compared = 4 * len(channel_scales.POWERS) * channel_scales.SEARCH_TOKENS
        yield Phase(
            4 * 2 * ((1 + searches) * block + tokens * sizes.hidden),
            forward=tokens + searches * compared,
        )
    if config.mixed_precision:
        held_out = PLANS * search.HELD_OUT_TOKENS
        yield Phase(0, 0, held_out, search.CALIBRATION_TOKENS, GRIDS)
    # Rounding, or the calibration of block by block.
    if config.method == "rtn" or not sizes.blocks:
        yield Phase(shape.dtype.size * sizes.weights // 2)
    else:
        width, hidden = sizes.width, sizes.hidden
        tokens = calibration.num_tokens or sequential.default_num_tokens(width)
        # Tokens that go forward and back before the blocks are quantized, and tokens of
        # the full-precision stream.
        settings = config.as_gptq if is_awq else config
        outputs = [hidden] * settings.output_hessian
        most = min(gptq.GPTQ.max_fisher_tokens, tokens)
        fisher = num_fisher_tokens([hidden], outputs, most)
        compared = min(gptq.COMPARED_TOKENS[settings.effort], tokens)
        compared *= settings.asymmetric_calibration
        yield Phase(
            (4 + shape.dtype.size) * sizes.largest
            + 4 * SOLVER_ARRAYS * MAX_ELEMENTS
            + sizes.predictions(PREDICTED)
            + 4 * HESSIANS * width**2,
            (tokens + compared) * (2 * 4 * width + 6 * 4 * hidden)
            + fisher * 4 * hidden * (len(sizes.blocks) + 1),
            # Through the full-precision block, then the quantized one.
            2 * tokens + compared,
            fisher,
            1 + settings.refine_iters,
        )
    held_out, dense = calibration.num_eval_tokens, 4 * sizes.weights
    compared = dense + sizes.predictions(logit_positions())
    if tuning := config.scale_tuning:
        wanted = tuning.steps * tuning.batch_tokens
        stored = min(calibration.num_tokens or wanted, wanted)
        tokens = min(tuning.batch_tokens, TRAINED_TOKENS_AT_ONCE)
        logits = logit_bytes(vocabulary, tokens, chunk_of_many(vocabulary, tokens))
        yield Phase(
            dense + 4 * tokens * shape.inputs_and_outputs + logits,
            (held_out + stored) * bytes_per_token(TUNING_TOP_K, vocabulary),
            TUNING_EVALUATIONS * held_out + stored,
            wanted,
        )
    if tuning or config.compares_with_rtn:
        yield Phase(compared, forward=3 * held_out)
    if config.kv_cache:
        # Passes for every layer, number of bits and candidate.
        candidates = set(config.kv_cache.candidate_bits)
        bits = sum(b != kv_bits.UNQUANTIZED for b in candidates)
        passes = 1 + bits * len(make_cache(shape.model()))
        tokens = passes * kv_bits.CALIBRATION_TOKENS + (2 + bits) * held_out
        yield Phase(compared, forward=tokens)
