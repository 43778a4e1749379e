"""Bits, group size and mode of quantized layers, with overrides by layer."""

from typing import Annotated, Literal, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from .base import ConfigModel

FloatMode = Literal["mxfp4", "nvfp4", "mxfp8"]
GGUFMode = Literal["q3_k", "q4_0", "q4_k", "q5_0", "q5_k", "q6_k", "q8_0"]
Mode = Literal["affine", FloatMode, GGUFMode]
Bits = Literal[2, 3, 4, 5, 6, 8]
KVCacheBits = Literal[2, 3, 4, 5, 6, 8, 16]
KV_CACHE_BITS: tuple[int, ...] = get_args(KVCacheBits)
KVPolicy = Literal["window", "snapkv"]
KV_POLICIES: tuple[str, ...] = get_args(KVPolicy)
# The least bound of keys and values: some of them are always kept.
MIN_KV_SIZE = 64
GroupSize = Literal[16, 32, 64, 128]

# Group size and bits of MLX's floating-point modes.
FLOAT_MODES = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
# Modes of `mx.qqmm`, which quantizes inputs too.
ACTIVATION_MODES = ("nvfp4", "mxfp8")
# Group size and bits of GGUF's block types.
GGUF_MODES = {
    "q3_k": (16, 3),
    "q4_0": (32, 4),
    "q4_k": (32, 4),
    "q5_0": (32, 5),
    "q5_k": (32, 5),
    "q6_k": (16, 6),
    "q8_0": (32, 8),
}
FIXED_MODES = FLOAT_MODES | GGUF_MODES
# Weights of a K block, and the mode of a layer whose width is no multiple of that.
K_BLOCK = 256
NARROW_MODES: dict[str, GGUFMode] = {
    "q3_k": "q4_0",
    "q4_k": "q5_0",
    "q5_k": "q5_0",
    "q6_k": "q8_0",
}
# The least groups of MLX's affine quantization.
MIN_AFFINE_GROUP = 32


class QuantSpec(ConfigModel):
    """Bits, group size and mode of a quantized weight, as MLX stores it."""

    bits: Bits | None = None
    """Bits per code. affine: 2, 3, 4, 5, 6 or 8 (default 4). Other modes fix it."""
    group_size: GroupSize | None = None
    """Weights that share a scale. affine: 32, 64 or 128 (default 64). Other modes fix
    it."""
    mode: Mode = "affine"
    """affine (a scale and a bias per group); a floating-point mode: mxfp4, nvfp4,
    mxfp8; or a block type of GGUF: q4_0, q5_0, q8_0, q3_k, q4_k, q5_k, q6_k."""
    global_scale: bool = False
    """nvfp4: a float32 scale for each expert of a mixture, besides the scales of its
    groups. Other layers have none. mlx-lm runs such experts on GPUs only."""

    @model_validator(mode="after")
    def _fill_defaults(self):
        group_size, bits = FIXED_MODES.get(self.mode, (64, 4))
        if self.mode == "affine":
            if self.group_size == 16:
                raise ValueError("affine groups have 32, 64 or 128 weights, not 16")
        elif (self.group_size or group_size, self.bits or bits) != (group_size, bits):
            raise ValueError(
                f"{self.mode} has {bits} bits and groups of {group_size}; "
                "remove bits and group_size"
            )
        if self.global_scale and self.mode != "nvfp4":
            raise ValueError(f"global_scale needs mode: nvfp4; the mode is {self.mode}")
        object.__setattr__(self, "bits", self.bits or bits)
        object.__setattr__(self, "group_size", self.group_size or group_size)
        return self

    @property
    def is_gguf(self) -> bool:
        """Whether the grid is that of a block type of GGUF."""
        return self.mode in GGUF_MODES

    @property
    def stored(self) -> "QuantSpec | None":
        """The grid as an MLX checkpoint names it; None = the layer is dense there.

        Blocks of GGUF are affine groups of 32 with float32 scales and biases. Groups of
        16 are too small for MLX: their weights are stored in float32.
        """
        if not self.is_gguf:
            return self
        if self.group_size < MIN_AFFINE_GROUP:
            return None
        return QuantSpec(bits=self.bits, group_size=self.group_size)

    @property
    def scale_bits(self) -> int:
        """Bits of a group's scale and bias in an MLX checkpoint of 16 bits."""
        if self.is_gguf:
            return 64
        return 32 if self.mode == "affine" else 8

    def fits(self, width: int) -> bool:
        """Whether `width` input channels divide into groups, and groups into blocks."""
        return width % (K_BLOCK if self.mode in NARROW_MODES else self.group_size) == 0

    def for_width(self, width: int) -> "QuantSpec":
        """This grid, or for K blocks that do not fit, small blocks of as many bits or
        more, as llama.cpp chooses them."""
        if self.mode not in NARROW_MODES or self.fits(width):
            return self
        return QuantSpec(mode=NARROW_MODES[self.mode])


class LayerQuantOverride(ConfigModel):
    """Quantization of some layers. Absent keys are those of the other layers."""

    bits: Bits | None = None
    """Bits per code."""
    group_size: GroupSize | None = None
    """Weights that share a scale."""
    mode: Mode | None = None
    """Another mode has its own defaults for bits and group_size."""
    global_scale: bool | None = None
    """nvfp4: a float32 scale for each expert."""

    def resolve(self, default: QuantSpec) -> QuantSpec:
        """The complete spec; absent keys come from `default` if the mode is the same.

        Raises:
            ValueError: MLX does not support this combination.
        """
        given = self.model_dump(exclude_none=True)
        same_mode = given.setdefault("mode", default.mode) == default.mode
        inherited = default.model_dump(include=set(QuantSpec.model_fields))
        return QuantSpec(**(inherited if same_mode else {}) | given)


SKIP = "skip"
LayerOverride = Annotated[
    Annotated[LayerQuantOverride, Tag("spec")]
    | Annotated[Literal["skip"], Tag("skip")],
    Discriminator(lambda value: "skip" if isinstance(value, str) else "spec"),
]


class QuantizationConfig(QuantSpec):
    """The default spec, and overrides by layer."""

    overrides: dict[str, LayerOverride] = Field(
        {}, examples=[{"*.down_proj": {"bits": 6}, "lm_head": "skip"}]
    )
    """Other specs by layer pattern, e.g. `"*.down_proj": {bits: 4}`, or skip to leave a
    layer unquantized, such as `lm_head` or `"*.embed_tokens"`. A pattern matches the
    full path or the path within the block. The first match counts; it has priority over
    the model's own requests."""
    quantize_activations: bool = False
    """Also quantize the inputs of linear layers, in the mode of their weights: W4A4
    with nvfp4, W8A8 with mxfp8. Evaluation, generation and `qat` compute what `mx.qqmm`
    computes. Embeddings, a tied output head and experts keep full-precision inputs."""

    @model_validator(mode="after")
    def _check_modes(self):
        if self.quantize_activations and self.mode not in ACTIVATION_MODES:
            raise ValueError(
                f"quantize_activations needs mode: {' or '.join(ACTIVATION_MODES)}"
            )
        for pattern, override in self.overrides.items():
            if override != SKIP:
                try:
                    override.resolve(self)
                except ValueError as error:
                    reason = error.errors()[0]["ctx"]["error"]
                    raise ValueError(f"{pattern}: {reason}") from error
        return self
