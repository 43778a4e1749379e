"""Models, weights and calibration batches for tests of quantization."""

import mlx.core as mx
import numpy as np
from lmx.data.calibration import CalibrationBatch
from lmx.interfaces import Logger
from lmx.models.loader import build_model
from lmx.quantization.ptq.base import PTQContext
from mlx.utils import tree_map


def windows_of(tokens, counted=None) -> CalibrationBatch:
    """Return a batch of tokens [n, L]. Without `counted`, every position counts."""
    tokens = np.array(tokens, np.int32)
    return CalibrationBatch(
        tokens, np.ones(tokens.shape, bool) if counted is None else counted
    )


def context_of(model, specs, windows, folder, dtype=mx.float32, **options):
    """What a method gets; `windows` are its calibration tokens."""
    options = {"logger": Logger()} | options
    return PTQContext(model, specs, dtype, lambda *_: windows, folder, **options)


def tensors_of(tensors, path) -> dict[str, mx.array]:
    """Codes, scales and biases of a layer by leaf."""
    names = ("weight", "scales", "biases")
    return {n: tensors[k] for n in names if (k := f"{path}.{n}") in tensors}


def enlarged_model(config):
    """A model with weights twice as large, so that logits differ between tokens."""
    mx.random.seed(5)
    model = build_model(config)
    model.update(tree_map(lambda v: 2 * v if v.ndim > 1 else v, model.parameters()))
    return model.eval()


def normal(*shape, seed=0, scale=0.05):
    return scale * mx.random.normal(shape, key=mx.random.key(seed))


def to_float64(value) -> np.ndarray:
    return np.array(value.astype(mx.float32)).astype(np.float64)


def correlated_inputs(width, count=2048, seed=0) -> np.ndarray:
    """Return correlated inputs of different magnitudes, as in a model."""
    generator = np.random.default_rng(seed)
    mixing = np.eye(width) + generator.normal(size=(width, width)) / np.sqrt(width)
    sizes = np.exp(0.7 * generator.normal(size=width))
    return generator.normal(size=(count, width)) @ mixing * sizes


def naive_gptq(target, hessian, group, nearest) -> np.ndarray:
    """Optimal brain quantization: remove each column from the inverse.

    Args:
        nearest: (values [N] of a column, its group) -> codes and weights [N].
    """
    remaining, codes = to_float64(target), np.zeros(target.shape)
    inverse = np.linalg.inv(to_float64(hessian.matrix))
    for column in np.array(hessian.order):
        codes[:, column], rounded = nearest(remaining[:, column], column // group)
        error, pivot = remaining[:, column] - rounded, inverse[column, column]
        remaining = remaining - np.outer(error, inverse[column] / pivot)
        inverse = inverse - np.outer(inverse[:, column], inverse[column]) / pivot
    return codes
