"""The `adapter` block: LoRA and DoRA."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from .base import ConfigModel

Rank = Annotated[int, Field(ge=1)]
# Discriminated by Python type, so that one mistake gives one error, not three.
TargetModules = Annotated[
    Annotated[Literal["auto"], Tag("str")]
    | Annotated[list[str], Field(min_length=1), Tag("list")]
    | Annotated[dict[str, Rank], Field(min_length=1), Tag("dict")],
    Discriminator(lambda v: type(v).__name__ if isinstance(v, str | dict) else "list"),
]


class LoRAConfig(ConfigModel):
    """A low-rank adapter (LoRA, arXiv 2106.09685): W + alpha / rank * B A."""

    type: Literal["lora", "dora"] = "lora"
    """lora. dora (arXiv 2402.09353): also trains the magnitude of every output channel;
    not for expert layers, and not with qat."""
    rank: Rank = 16
    """Rank of the update."""
    alpha: float | None = Field(None, gt=0)
    """Scale of the update times the rank. Default: the scale is 2 at `rank`."""
    use_rslora: bool = False
    """Divide alpha by the square root of the rank (rsLoRA, arXiv 2312.03732)."""
    loraplus_lr_ratio: float = Field(1.0, gt=0)
    """Learning rate of B divided by that of A (LoRA+, arXiv 2402.12354)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapter input. Not with qat, which merges the adapter in every
    step."""
    target_modules: TargetModules = Field(
        "auto", examples=["auto", ["*_proj"], {"self_attn.*": 32, "mlp.*": 8}]
    )
    """Layers to adapt: auto, a list of shell patterns, or a mapping of patterns to
    ranks (the first match counts). A pattern matches the layer's path within its block,
    or the full path outside the blocks. `auto`, also as a pattern: all linear and
    expert layers inside the blocks, except layers smaller than their adapter and
    indexers (which receive no gradient). `*`: the same including those. Layers outside
    the blocks (`model.embed_tokens`, `lm_head`) need their own pattern. Expert routers
    are never adapted. With qat, only linear layers are adapted."""
    init_from: str | None = None
    """Folder of a trained adapter to continue from, in mlx-lm or peft format, for the
    same layers and with the same or a lower rank. Default: a new adapter."""
    num_layers: int | None = Field(None, ge=1)
    """Adapt only the last N blocks. Default: all blocks."""

    @property
    def ranks(self) -> dict[str, int]:
        """Rank by pattern."""
        match self.target_modules:
            case dict():
                return self.target_modules
            case str():
                return {self.target_modules: self.rank}
        return dict.fromkeys(self.target_modules, self.rank)

    def scale(self, rank: int) -> float:
        """Factor on the product B A of two matrices with this rank."""
        power = 0.5 if self.use_rslora else 1.0
        alpha = 2.0 * self.rank**power if self.alpha is None else self.alpha
        return alpha / rank**power
