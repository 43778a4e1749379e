"""The feed-forward layer of drafters."""

import mlx.core as mx
import mlx.nn as nn


class SwiGLU(nn.Module):
    """The gated feed-forward layer of Llama and Qwen (arXiv 2002.05202)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Outputs [..., width] of inputs [..., width]."""
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))
