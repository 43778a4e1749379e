"""What a quantized layer is: bits, group size, mode; one object for all who round."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from .base import ConfigModel

Mode = Literal["affine", "mxfp4", "nvfp4", "mxfp8"]
Bits = Literal[2, 3, 4, 5, 6, 8]
GroupSize = Literal[16, 32, 64, 128]

# MLX's floating-point modes have one group size and one width each.
FIXED_MODES = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}


class QuantSpec(ConfigModel):
    """Bits, group size and mode of a quantized weight, as MLX stores it."""

    bits: Bits | None = None
    """Bits per code. Affine: 2, 3, 4, 5, 6 or 8 (default 4); other modes fix it."""
    group_size: GroupSize | None = None
    """Weights that share a scale. Affine: 32, 64 or 128 (default 64)."""
    mode: Mode = "affine"
    """affine (scale and bias), or the floating-point modes mxfp4, nvfp4, mxfp8."""

    @model_validator(mode="after")
    def _complete(self):
        group_size, bits = FIXED_MODES.get(self.mode, (64, 4))
        if self.mode == "affine":
            if self.group_size == 16:
                raise ValueError("affine groups are 32, 64 or 128 weights, not 16")
        elif (self.group_size or group_size, self.bits or bits) != (group_size, bits):
            raise ValueError(
                f"{self.mode} has groups of {group_size} and {bits} bits; "
                "leave bits and group_size out"
            )
        object.__setattr__(self, "bits", self.bits or bits)
        object.__setattr__(self, "group_size", self.group_size or group_size)
        return self

    def fits(self, width: int) -> bool:
        """Whether rows of `width` weights divide into this spec's groups."""
        return width % self.group_size == 0


class LayerQuantOverride(ConfigModel):
    """What some layers have of their own; the rest is as for the others."""

    bits: Bits | None = None
    """Bits per code."""
    group_size: GroupSize | None = None
    """Weights that share a scale."""
    mode: Mode | None = None
    """Another one brings its own defaults of bits and group size."""

    def completed(self, default: QuantSpec) -> QuantSpec:
        """This, and what it leaves open by the default, where that is of its mode.

        Raises:
            ValueError: MLX has no such grid.
        """
        own = self.model_dump(exclude_none=True)
        same = own.setdefault("mode", default.mode) == default.mode
        grid = default.model_dump(include=set(QuantSpec.model_fields)) if same else {}
        return QuantSpec(**grid | own)


SKIP = "skip"
LayerOverride = Annotated[
    Annotated[LayerQuantOverride, Tag("grid")]
    | Annotated[Literal["skip"], Tag("word")],
    Discriminator(lambda value: "word" if isinstance(value, str) else "grid"),
]


class QuantizationConfig(QuantSpec):
    """A grid, layers that have another, and what is rounded at all."""

    overrides: dict[str, LayerOverride] = Field({})
    """Other grids by layer, as `"*.down_proj": {bits: 4}`, or keep for none. A pattern
    is matched with the path and with the path within the block; the first one counts,
    also above what the model asks for."""
    quantize_embeddings: bool = True
    """Round the embedding (and, when tied, the output head) too."""
    quantize_lm_head: bool = True
    """Round the output head too, where it has weights of its own."""

    @model_validator(mode="after")
    def _layers_have_grids(self):
        for pattern, choice in self.overrides.items():
            if choice != SKIP:
                try:
                    choice.completed(self)
                except ValueError as error:
                    reason = error.errors()[0]["ctx"]["error"]
                    raise ValueError(f"{pattern}: {reason}") from error
        return self
