"""What a recipe says of an adapter: its kind, size, strength and place."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from .base import ConfigModel

Rank = Annotated[int, Field(ge=1)]
# Told apart by their type, for a fault in one is not to be told as two.
TargetModules = Annotated[
    Annotated[Literal["auto"], Tag("str")]
    | Annotated[list[str], Field(min_length=1), Tag("list")]
    | Annotated[dict[str, Rank], Field(min_length=1), Tag("dict")],
    Discriminator(lambda v: type(v).__name__ if isinstance(v, str | dict) else "list"),
]


class LoRAConfig(ConfigModel):
    """A low-rank adapter (LoRA, arXiv 2106.09685): weight + alpha / rank * B A."""

    type: Literal["lora", "dora", "qa_lora"] = "lora"
    """lora; or dora (arXiv 2402.09353), which also learns every row's magnitude; dora
    leaves the experts of a mixture alone and does not go with quantization; or qa_lora
    (arXiv 2309.14717), for linear layers of a model in codes: one number for all
    weights of a group, which its bias takes up, so that codes stay and nothing is
    made dense."""
    rank: Rank = 16
    """Rank of the update."""
    alpha: float | None = Field(None, gt=0)
    """Scale of the update times rank; absent = the scale is 2 at `rank`."""
    use_rslora: bool = False
    """Divide alpha by the square root of the rank (rsLoRA, arXiv 2312.03732)."""
    loraplus_lr_ratio: float = Field(1.0, gt=0)
    """Learning rate of B as a multiple of A's (LoRA+, arXiv 2402.12354)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapter's input; not with quantization or qa_lora, which need the
    merge."""
    target_modules: TargetModules = "auto"
    """Which layers: auto, or a list of shell patterns of a path in its block, or of the
    whole path outside the blocks; or a mapping of patterns to ranks, the first match
    counting. `auto`, also as a pattern, is every linear and expert layer of the blocks
    that is larger than its adapter would be, without what only chooses tokens by their
    order, for no gradient comes there; `*` is these too. Embeddings and what is outside
    the blocks (`model.embed_tokens`, `lm_head`) need a pattern of their own; routers of
    experts are always left alone. With quantization only linear layers are adapted."""
    init_from: str | None = None
    """Folder of a trained adapter to go on from, in mlx-lm's or peft's format, of the
    same layers and no higher rank; absent = a new one."""
    num_layers: int | None = Field(None, ge=1)
    """Adapt only this many of the last blocks; absent = all."""

    @property
    def ranks(self) -> dict[str, int]:
        """Rank by pattern."""
        if isinstance(self.target_modules, dict):
            return self.target_modules
        patterns = (
            [self.target_modules]
            if self.target_modules == "auto"
            else self.target_modules
        )
        return dict.fromkeys(patterns, self.rank)

    def scale(self, rank: int) -> float:
        """What the product of two matrices of this rank is multiplied by."""
        power = 0.5 if self.use_rslora else 1.0
        alpha = 2.0 * self.rank**power if self.alpha is None else self.alpha
        return alpha / rank**power
