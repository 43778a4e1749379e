"""KL divergence of quantized models from the full-precision model.

`ptq_divergence.py REFERENCE EVAL.npy MODEL...` writes divergence.npz into each MODEL.
mlx_lm loads each model as published and dequantizes it in its stored dtype. Forward
passes are in float32, probabilities in float64 by NumPy.
"""

import sys
from pathlib import Path

import numpy as np

PROGRAM = Path(__file__)
RESULT = "divergence.npz"
BATCH_SIZE = 4


def main() -> None:
    reference, tokens = sys.argv[1], np.load(sys.argv[2])
    from lmx.cpu import blas

    blas.use_openblas()
    for folder in map(Path, sys.argv[3:]):
        np.savez(folder / RESULT, **measure(reference, folder, tokens))


def measure(reference: str, folder: Path, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """kl, agrees, nll, full_nll by sequence and position [n, L - 1]; bits."""
    full, _ = _load(reference)
    quantized, bits = _load(folder)
    batches = []
    for start in range(0, len(tokens), BATCH_SIZE):
        batch = tokens[start : start + BATCH_SIZE]
        p, q = (_log_probabilities(model, batch) for model in (full, quantized))
        targets = batch[:, 1:, None]
        batches.append(
            {
                "kl": (np.exp(p) * (p - q)).sum(axis=-1),
                "agrees": p.argmax(axis=-1) == q.argmax(axis=-1),
                "nll": -np.take_along_axis(q, targets, axis=-1)[..., 0],
                "full_nll": -np.take_along_axis(p, targets, axis=-1)[..., 0],
            }
        )
    joined = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
    return joined | {"bits": np.array(bits)}


def _load(path):
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.utils import compute_bits_per_weight, dequantize_model

    model, _ = load(str(path))
    bits = compute_bits_per_weight(model)
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    return model, bits


def _log_probabilities(model, tokens: np.ndarray) -> np.ndarray:
    import mlx.core as mx

    logits = np.array(model(mx.array(tokens[:, :-1]))).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


if __name__ == "__main__":
    main()
