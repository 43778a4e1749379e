"""Memory, disk and work of a quantization, from shapes alone."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ...config.quant_spec import QuantSpec
from ...config.quantize import AWQConfig, PTQConfig
from ...models.hooks import find_blocks
from ..estimate import Estimate, ModelShape
from ..work import Work

# quantization/ptq/gptq: float32 arrays as large as the rows that are solved at once,
# matrices of a Hessian and its factors, and predictions of two models.
SOLVER_ARRAYS, HESSIANS, PREDICTION_ARRAYS = 12, 8, 6
# Positions of the predictions in a calibration.
PREDICTED = 128
# quantization/mixed_precision: compared plans, and solved grids of a weight.
PLANS, GRIDS = 6, 16


class Phase(NamedTuple):
    """Bytes of memory and of files, tokens that go forward, or forward and back, and
    how often every weight is solved."""

    memory: float = 0
    disk: int = 0
    forward: int = 0
    trained: int = 0
    solves: int = 0


def estimate_quantization(config: PTQConfig, shape: ModelShape) -> Estimate:
    """What a quantize stage needs.

    Its phases run one after the other: their work and their files add up, and the
    largest one decides about memory.
    """
    specs = shape.selection(config).specs
    quantized = shape.quantized(specs)
    if target := config.mixed_precision:
        quantized = replace(quantized, bytes=target.max_bytes(shape.parameters))
    phases = [*_phases(config, shape, specs)]
    memory, *sums = zip(*phases, strict=True)
    disk, forward, trained, solves = map(sum, sums)
    per_token = 2 * shape.per_token[0]
    work = Work(
        trained=3 * per_token * trained,
        forward=per_token * forward,
        solved=sum(map(prod, shape.matrices.values())) * solves,
    )
    parts = {"quantization": int(max(memory))}
    return Estimate(quantized, parts, quantized.bytes + disk, work)


def _phases(
    config: PTQConfig, shape: ModelShape, specs: dict[str, QuantSpec]
) -> Iterator[Phase]:
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
    from .rollback import TOP_K

    calibration, matrices = config.calibration, shape.matrices
    # Weights of each block that are quantized, and of all matrices outside of blocks.
    found, blocks = find_blocks(shape.model()), Counter()
    prefix = found.prefix if found else " "
    for path in specs:
        if path.startswith(prefix):
            index = path.removeprefix(prefix).partition(".")[0]
            blocks[index] += prod(matrices[f"{path}.weight"])
    outer = [prod(v) for k, v in matrices.items() if not k.startswith(prefix)]
    weights = sum(map(prod, matrices.values()))
    width = max(size[-1] for size in matrices.values())
    embeddings = [size for name, size in matrices.items() if "embed" in name]
    vocabulary, hidden = max(embeddings, key=prod, default=(0, width))
    # Bytes of the predictions of two models for a token.
    predictions = 4 * PREDICTION_ARRAYS * vocabulary
    is_awq = isinstance(config, AWQConfig)
    for searches in [False] * bool(config.smoothing) + [True] * is_awq:
        # Blocks in float32, and the hidden states around one. AWQ compares the outputs
        # for every power, mostly at four places.
        most = channel_scales.MAX_TOKENS
        tokens = min(calibration.num_tokens or most, most)
        block = max(blocks.values(), default=0)
        compared = 4 * len(channel_scales.POWERS) * channel_scales.SEARCH_TOKENS
        yield Phase(
            4 * 2 * ((1 + searches) * block + tokens * hidden),
            forward=tokens + searches * compared,
        )
    if config.mixed_precision:
        held_out = PLANS * search.HELD_OUT_TOKENS
        yield Phase(0, 0, held_out, search.CALIBRATION_TOKENS, GRIDS)
    # Rounding, or the calibration of block by block.
    if config.method == "rtn" or not blocks:
        yield Phase(shape.dtype.size * weights // 2)
    else:
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
            (4 + shape.dtype.size) * max(*blocks.values(), *outer, 0)
            + 4 * SOLVER_ARRAYS * MAX_ELEMENTS
            + predictions * PREDICTED
            + 4 * HESSIANS * width**2,
            (tokens + compared) * (2 * 4 * width + 6 * 4 * hidden)
            + fisher * 4 * hidden * (len(blocks) + 1),
            # Through the full-precision block, then the quantized one.
            2 * tokens + compared,
            fisher,
            1 + settings.refine_iters,
        )
    held_out, dense = calibration.num_eval_tokens, 4 * weights
    compared = dense + predictions * logit_positions()
    if config.compares_with_rtn:
        stored = held_out * bytes_per_token(TOP_K, vocabulary)
        yield Phase(compared, stored, forward=3 * held_out)
    if config.kv_cache:
        # Passes for every layer, number of bits and candidate.
        candidates = set(config.kv_cache.candidate_bits)
        bits = sum(b != kv_bits.UNQUANTIZED for b in candidates)
        passes = 1 + bits * len(make_cache(shape.model()))
        tokens = passes * kv_bits.CALIBRATION_TOKENS + (2 + bits) * held_out
        yield Phase(compared, forward=tokens)
