"""Held-out tokens of `real_model.py`, and the divergence of a model on them.

    real_model_divergence.py expand GGUF TARGET
    real_model_divergence.py prepare MODEL FOLDER OPTIONS
    real_model_divergence.py measure FOLDER MODEL

`prepare` stores held-out sequences and the reference's last hidden states. `measure`
prints JSON: by text, the sums over each sequence of KL, negative log-likelihoods and
equal predictions. Logits are computed for a part of a sequence at a time.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
import gsm8k

PROGRAM = Path(__file__)
# Positions whose logits are in memory at once.
POSITIONS = 256
TEXT, ANSWERS = "text", "answers"


def main() -> None:
    from lmx import cpu

    cpu.enable()
    verb, *arguments = sys.argv[1:]
    {"expand": expand, "prepare": prepare, "measure": measure}[verb](*arguments)


def expand(source: str, target: str) -> None:
    """Write a quantized checkpoint as float16."""
    import mlx.core as mx
    from lmx.convert.importers import resolve_checkpoint
    from mlx_lm import load
    from mlx_lm.utils import dequantize_model, save

    folder = resolve_checkpoint(source)
    model, tokenizer, config = load(str(folder), return_config=True)
    model = dequantize_model(model)
    model.set_dtype(mx.float16)
    config = {k: v for k, v in config.items() if not k.startswith("quantization")}
    partial = Path(f"{target}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    save(str(partial), str(folder), model, tokenizer, config)
    partial.rename(target)


def prepare(model: str, folder: str, options: str) -> None:
    """Write held-out.npz."""
    from mlx_lm import load

    settings = json.loads(options)
    reference, tokenizer = load(model)
    sequences = _text(tokenizer, settings) if settings["text"] else {}
    if settings["questions"]:
        sequences |= _answers(tokenizer, settings)
    arrays = {}
    network = _Network(reference)
    for name, (tokens, starts) in sequences.items():
        for number, (row, start) in enumerate(zip(tokens, starts, strict=True)):
            arrays[f"{name}:{number}:tokens"] = np.array(row, np.int32)
            arrays[f"{name}:{number}:start"] = np.array(start)
            arrays[f"{name}:{number}:hidden"] = network.hidden(row)
    partial = Path(folder, "held-out.partial.npz")
    np.savez(partial, reference=str(Path(model).resolve()), **arrays)
    partial.rename(Path(folder, "held-out.npz"))


def _text(tokenizer, settings: dict) -> dict[str, tuple[list, list]]:
    from lmx.data.calibration import concatenated_sequences
    from lmx.data.dataset import RecordReader

    tokens = concatenated_sequences(
        RecordReader(settings["text"]),
        tokenizer,
        length=settings["length"],
        tokens=settings["tokens"],
        seed=0,
    ).tokens
    return {TEXT: (list(tokens), [0] * len(tokens))}


def _answers(tokenizer, settings: dict) -> dict[str, tuple[list, list]]:
    """Chats, of which only the last message counts."""
    tokens, starts = [], []
    with Path(settings["questions"]).open() as lines:
        for _, line in zip(range(settings["answers"]), lines, strict=False):
            messages = gsm8k.chat(json.loads(line))["messages"]
            prompt = tokenizer.apply_chat_template(
                messages[:-1], add_generation_prompt=True
            )
            tokens.append(tokenizer.apply_chat_template(messages))
            starts.append(len(prompt) - 1)
    return {ANSWERS: (tokens, starts)}


def measure(folder: str, target: str) -> None:
    """Print the sums of every sequence as JSON."""
    import mlx.nn as nn
    from lmx.models.loader import load as load_with_lmx
    from mlx_lm import load
    from mlx_lm.utils import compute_bits_per_weight, dequantize_model

    held_out = np.load(Path(folder, "held-out.npz"))
    reference = _Network(load(str(held_out["reference"]))[0])
    model, _ = load(target)
    result = {"bits": compute_bits_per_weight(model), "sequences": {}}
    if any(isinstance(module, nn.QQLinear) for module in model.modules()):
        # MLX's CPU backend multiplies quantized inputs of one token only.
        model = load_with_lmx(target).model
    else:
        model = dequantize_model(model)
    network = _Network(model)
    keys = [key for key in held_out.files if key.endswith(":tokens")]
    for key in keys:
        name, number, _ = key.split(":")
        tokens, start, hidden = (
            held_out[f"{name}:{number}:{kind}"]
            for kind in ("tokens", "start", "hidden")
        )
        sums = _compare(reference, network, tokens, int(start), hidden)
        result["sequences"].setdefault(name, []).append(sums)
    print(json.dumps(result))


class _Network:
    """A model in float32, whose logits are computed in parts."""

    def __init__(self, model):
        import mlx.core as mx
        from lmx.models.blockwise import BlockwiseModel

        model.set_dtype(mx.float32)
        self.blockwise = BlockwiseModel(model)

    def hidden(self, tokens) -> np.ndarray:
        """Output of the last block [L - 1, width]."""
        import mlx.core as mx

        tokens = mx.array(tokens)[None, :-1]
        hidden = self.blockwise.embed(tokens)
        for index in range(len(self.blockwise)):
            hidden = self.blockwise.run_block(index, tokens, hidden)
        return np.array(hidden[0])

    def logits(self, tokens: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        import mlx.core as mx

        tokens, hidden = mx.array(tokens)[None], mx.array(hidden)[None]
        return np.array(self.blockwise.logits(tokens, hidden)[0])


def _compare(
    reference: _Network, network: _Network, tokens, start: int, full: np.ndarray
) -> dict[str, float]:
    """Sums over the positions of a sequence from `start`."""
    hidden = network.hidden(tokens)
    sums = {"count": 0, "kl": 0.0, "nll": 0.0, "full_nll": 0.0, "agrees": 0}
    for first in range(start, len(hidden), POSITIONS):
        part = slice(first, min(first + POSITIONS, len(hidden)))
        inputs, targets = tokens[:-1][part], tokens[1:][part]
        p, q = (
            reference.logits(inputs, full[part]),
            network.logits(inputs, hidden[part]),
        )
        rows = np.arange(len(targets))
        p -= p.max(axis=1, keepdims=True)
        q -= q.max(axis=1, keepdims=True)
        exp_p = np.exp(p)
        total_p, total_q = (e.sum(axis=1, dtype=np.float64) for e in (exp_p, np.exp(q)))
        sums["count"] += len(targets)
        sums["agrees"] += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
        sums["nll"] += float((np.log(total_q) - q[rows, targets]).sum())
        sums["full_nll"] += float((np.log(total_p) - p[rows, targets]).sum())
        cross = (exp_p * (p - q)).sum(axis=1, dtype=np.float64) / total_p
        sums["kl"] += float((cross - np.log(total_p) + np.log(total_q)).sum())
    return sums


if __name__ == "__main__":
    main()
