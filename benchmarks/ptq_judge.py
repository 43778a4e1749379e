"""How far quantized models are from the full-precision one; the same for all of them.

`ptq_judge.py REFERENCE HELD_OUT.npy MODEL...` writes judged.npz into every MODEL. Every
model is loaded by mlx_lm as it is published, expanded to dense weights in the type that
it stores, and computes in float32; probabilities are taken in float64 by NumPy.
"""

import sys
from pathlib import Path

import numpy as np

PROGRAM = Path(__file__)
JUDGED = "judged.npz"
AT_ONCE = 4


def main() -> None:
    reference, tokens = sys.argv[1], np.load(sys.argv[2])
    from lmx.cpu import blas

    blas.use_openblas()
    for folder in map(Path, sys.argv[3:]):
        np.savez(folder / JUDGED, **judge(reference, folder, tokens))


def judge(reference: str, folder: Path, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """By window and position, [n, L - 1]: kl, agrees, and both models' nll; bits."""
    teacher, _ = _loaded(reference)
    student, bits = _loaded(folder)
    parts = []
    for start in range(0, len(tokens), AT_ONCE):
        part = tokens[start : start + AT_ONCE]
        p, q = (_log_probabilities(model, part) for model in (teacher, student))
        following = part[:, 1:, None]
        parts.append(
            {
                "kl": (np.exp(p) * (p - q)).sum(axis=-1),
                "agrees": p.argmax(axis=-1) == q.argmax(axis=-1),
                "nll": -np.take_along_axis(q, following, axis=-1)[..., 0],
                "full_nll": -np.take_along_axis(p, following, axis=-1)[..., 0],
            }
        )
    joined = {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
    return joined | {"bits": np.array(bits)}


def _loaded(path):
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
