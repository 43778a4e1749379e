"""The train stage: full or LoRA, plain or quantization-aware, through the one loop."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from ..model.adapters.settings import Adapter
from ..quant.spec import Quantization
from ..section import Section

if TYPE_CHECKING:
    from .context import Artefact, Context

Fraction = Annotated[float, Field(ge=0, le=1)]


class Config(Section):
    """Train or fine-tune the current model."""

    adapter: Adapter | None = None
    """Absent = full fine-tuning of every parameter."""
    quantization: Quantization | None = None
    """Present = quantization-aware training with straight-through rounding."""
    steps: int | None = Field(None, ge=1)
    """Optimizer steps; or give epochs."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the training rows; or give steps."""
    batch_size: int | None = Field(None, ge=1)
    """Rows per step; or give batch_tokens."""
    batch_tokens: int | None = Field(None, ge=1)
    """Tokens per step, padding included: short rows go in larger batches."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup: Fraction = 0.05
    """Share of the steps over which the learning rate rises."""
    final_learning_rate: Fraction = 0.1
    """Learning rate at the last step, as a share of the peak."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    gradient_clip: float | None = Field(1.0, gt=0)
    """Largest gradient norm; null = no clipping."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto = bfloat16 for a bfloat16 model on a GPU, else float32. Trained weights stay
    float32."""
    evaluate_every: int = Field(100, ge=1)
    """Steps between validations."""
    evaluate_batches: int = Field(25, ge=1)
    """Validation batches per validation."""
    checkpoint_every: int = Field(200, ge=1)
    """Steps between checkpoints; two are kept."""
    report_every: int = Field(10, ge=1)
    """Steps between lines of the report."""
    samples: list[str] = Field([])
    """Prompts answered at every validation, into samples.jsonl."""

    @model_validator(mode="after")
    def _consistent(self):
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs")
        if (self.batch_size is None) == (self.batch_tokens is None):
            raise ValueError("give either batch_size or batch_tokens")
        if self.quantization and self.adapter and self.adapter.dropout:
            raise ValueError(
                "adapter dropout does not go with quantization: "
                "the rounded weight holds the merged adapter"
            )
        if self.quantization and self.adapter and self.adapter.type != "lora":
            raise ValueError(
                "a dora adapter does not go with quantization: use type lora, "
                "or train first and quantize afterwards"
            )
        return self


def run(config: Config, context: "Context") -> "Artefact":
    """Train the current model; leave it as a checkpoint, rounded if so trained."""
    from .training import Training

    training = Training(config, context)
    training.run()
    return training.write()
