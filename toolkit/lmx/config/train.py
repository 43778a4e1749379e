"""TODO."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .base import ConfigModel
from .lora import LoRAConfig
from .qat import QATConfig

BETAS = {"beta1", "beta2"}
# What only some optimizers have.
OPTIMIZER_KEYS = {
    "adamw": BETAS,
    "adafactor": set(),
    "lion": BETAS,
    "muon": {*BETAS, "momentum"},
    "sgd": {"momentum"},
}
# What makes every number's step of that number's gradient, so a share is enough.
ELEMENTWISE = ("adamw", "lion", "sgd")
# Logits of a batch from where on they are made by chunks, and those of such a chunk.
MANY_LOGITS, CHUNK_LOGITS = 1 << 27, 1 << 24
# Those that a CPU's caches hold, 16 MiB: there, chunks of so many are faster.
CACHED_LOGITS = 1 << 22

Fraction = Annotated[float, Field(ge=0, le=1)]
DivergenceName = Literal["forward_kl", "reverse_kl", "jsd", "cakld"]


class TeacherGenerationConfig(ConfigModel):
    """The teacher's own answers, in place of those of the rows (arXiv 2305.17888)."""

    temperatures: list[Annotated[float, Field(ge=0)]] = Field([1.0], min_length=1)
    """Every row is answered once at each; 0 = the likeliest token always, 1 = as the
    teacher would."""
    max_tokens: int = Field(256, ge=1)
    """Longest answer."""


class TeacherConfig(ConfigModel):
    """A model whose predictions are learned (distillation)."""

    model: str | None = None
    """A folder or Hub id with the same tokenizer; absent = the unquantized model that
    the stage starts from."""
    loss: DivergenceName = "forward_kl"
    """What is made small: forward = KL(teacher || student), reverse = KL(student ||
    teacher), jensen_shannon = between the two, confidence = a mix of both by how sure
    the teacher is of the rows (arXiv 2402.10631)."""
    temperature: float = Field(1.0, gt=0)
    """What the logits of both are divided by."""
    ce_weight: float = Field(0.0, ge=0, lt=1)
    """Share of the loss that is that of the rows' own tokens."""
    offline: bool = False
    """Ask the teacher once, before training, and keep its top_k likeliest tokens of
    every position on disk; else it runs beside the student in every step."""
    top_k: int = Field(64, ge=1)
    """Tokens of a position that are kept; all others are one outcome, the rest."""
    sequence_level: TeacherGenerationConfig | None = None
    """Present = train on the teacher's own answers to the rows."""

    @model_validator(mode="after")
    def _consistent(self):
        if not self.offline and self.top_k != type(self).model_fields["top_k"].default:
            raise ValueError("top_k is for cached: true; a live teacher gives all")
        return self


class TrainConfig(ConfigModel):
    """Train or fine-tune the current model."""

    adapter: LoRAConfig | None = None
    """Absent = full fine-tuning of every parameter."""
    qat: QATConfig | None = None
    """Present = quantization-aware training with straight-through rounding."""
    compare_full_precision: bool = False
    """Train the same a second time without quantization, from the unquantized model,
    and tell how much of the loss and the KL divergence that rounding this twin to
    nearest costs is recovered: (rounded - trained) / (rounded - twin), on the
    validation batches. The twin stays in the stage's folder. Where the unquantized
    model is the teacher it is the twin, and nothing more is trained."""
    teacher: TeacherConfig | None = None
    """Present = what a teacher predicts is learned, beside or in place of the rows."""
    steps: int | None = Field(None, ge=1)
    """Optimizer steps; or give epochs."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the training rows; or give steps."""
    batch_size: int | None = Field(None, ge=1)
    """Rows per step; or give batch_tokens."""
    batch_tokens: int | None = Field(None, ge=1)
    """Tokens per step, padding included: short rows go in larger batches."""
    packing: bool = False
    """Put several training examples into one row of max_seq_length tokens; none sees
    another, and hardly any token is padding."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Batches per step, in the memory of one; every trained token weighs the same."""
    gradient_checkpointing: bool = False
    """Keep only what goes in and out of every block and compute the rest twice: far
    less memory, about a third more time."""
    fsdp: bool = False
    """Keep only a share of the trained weights, their gradients and moments in every
    process, gathered when they are used; needs several processes over NCCL or JACCL."""
    loss_chunk_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Tokens whose logits exist at once; auto = few once a batch has 128 million,
    as 4096 tokens have with a vocabulary of 32768, on the CPU always; null = all."""
    optimizer: Literal["adamw", "adafactor", "lion", "muon", "sgd"] = "adamw"
    """What makes steps of gradients; muon has the matrices of the blocks and leaves the
    rest to adamw, at the same learning rate."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "linear", "constant", "warmup-stable-decay"] = (
        "cosine"
    )
    """How the learning rate falls after the warm-up."""
    decay_ratio: Fraction = 0.2
    """Share of the steps over which the learning rate falls, for warmup-stable-decay
    alone."""
    warmup_ratio: Fraction = 0.05
    """Share of the steps over which the learning rate rises."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at the last step, as a share of the peak."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment, for adamw, lion and muon's adamw."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment, as beta1; lion wants 0.99."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay of the sum of gradients, for muon and sgd."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Largest gradient norm; null = no clipping."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto = bfloat16 for a bfloat16 model on a GPU, else float32. Trained weights stay
    float32."""
    eval_steps: int = Field(100, ge=1)
    """Steps between validations."""
    eval_batches: int = Field(25, ge=1)
    """Validation batches per validation."""
    save_steps: int = Field(200, ge=1)
    """Steps between checkpoints."""
    save_total_limit: int = Field(2, ge=1)
    """Newest checkpoints that are kept to go on from."""
    load_best_at_end: bool = False
    """Weights the stage leaves; best = those of the validation with the lowest loss,
    with a teacher the lowest divergence from it, the one before the first step
    included, for which one more checkpoint is kept."""
    early_stopping_patience: int | None = Field(None, ge=1)
    """Validations in a row without a lower loss that end the training; null = none."""
    logging_steps: int = Field(10, ge=1)
    """Steps between lines of the report."""
    sample_prompts: list[str] = Field([])
    """Prompts answered at every validation, into samples.jsonl."""

    @model_validator(mode="after")
    def _consistent(self):
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs")
        if (self.batch_size is None) == (self.batch_tokens is None):
            raise ValueError("give either batch_size or batch_tokens")
        if self.adapter:
            self._can_merge(self.adapter)
        if self.qat:
            self._can_round(self.qat)
        elif self.compare_full_precision:
            raise ValueError(
                "compare_full_precision is for a stage with qat: it is without"
            )
        self._no_idle_keys()
        if self.fsdp:
            self._can_shard()
        return self

    def _can_merge(self, adapter: LoRAConfig):
        if adapter.dropout and (self.qat or self.keeps_codes):
            raise ValueError(
                "adapter dropout does not go with quantization: "
                "the rounded weight holds the merged adapter"
            )
        if self.qat and adapter.type == "dora":
            raise ValueError(
                "a dora adapter does not go with quantization: use type lora, "
                "or train first and quantize afterwards"
            )
        if adapter.init_from and self.keeps_codes:
            raise ValueError(
                "a qa_lora adapter is saved as plain LoRA's, not to be gone on from: "
                "name the model that it left as the recipe's model"
            )
        if self.qat and self.keeps_codes:
            raise ValueError(
                "a qa_lora adapter leaves the model in the codes it has: leave "
                "quantization out"
            )

    def _can_round(self, rounding: QATConfig):
        if rounding.quantizer == "scales_only" and self.adapter:
            raise ValueError(
                "quantizer: scales_only trains no weights: leave adapter out"
            )
        if not rounding.phase_starts[-1]:
            return
        names = [
            k
            for k in ("fake_quant_after_n_steps", "bit_schedule")
            if getattr(rounding, k)
        ]
        if self.load_best_at_end or self.early_stopping_patience:
            raise ValueError(
                f"{names[0]} does not go with load_best_at_end or early_stopping_patience: the "
                "validations before the last bits are of another model"
            )
        if self.steps and self.steps <= rounding.phase_starts[-1]:
            raise ValueError(f"{' and '.join(names)} must be below steps")

    def _can_shard(self):
        if self.adapter or self.qat or self.teacher:
            raise ValueError(
                "fsdp is for full fine-tuning: it goes with no adapter, quantization "
                "or teacher"
            )
        if self.optimizer not in ELEMENTWISE:
            raise ValueError(
                f"{self.optimizer} needs whole matrices: fsdp goes with adamw, lion "
                "and sgd"
            )

    def _no_idle_keys(self):
        idle = (BETAS | {"momentum"}) - OPTIMIZER_KEYS[self.optimizer]
        if found := sorted(idle & self._changed):
            raise ValueError(f"{self.optimizer} has no {found[0]}")
        if self.lr_schedule != "warmup-stable-decay" and "decay_ratio" in self._changed:
            raise ValueError("decay_ratio is for the schedule warmup-stable-decay")

    @property
    def num_trainings(self) -> int:
        """How many models are trained, all for the same steps."""
        return 2 if self.compare_full_precision and not self.is_self_distillation else 1

    @property
    def is_self_distillation(self) -> bool:
        """Whether all that is learned is what the model predicts when unquantized."""
        teacher = self.teacher
        return bool(teacher and not teacher.model and not teacher.ce_weight)

    @property
    def keeps_codes(self) -> bool:
        """Whether the model stays in codes, and their biases take up the adapter."""
        return self.adapter is not None and self.adapter.type == "qa_lora"

    @property
    def _changed(self) -> set[str]:
        """Keys given; as a resolved recipe gives all, those with other values."""
        fields = type(self).model_fields
        return {
            key
            for key in self.model_fields_set
            if getattr(self, key) != fields[key].default
        }

    def batches(self, per_epoch: int) -> int:
        """Batches in all; the last step may have fewer than the others."""
        if self.steps:
            return self.steps * self.gradient_accumulation_steps
        return max(1, round(self.epochs * per_epoch))

    def sequences_per_batch(self, max_seq_length: int) -> int:
        """Packed rows of `max_seq_length` tokens per batch."""
        return self.batch_size or max(1, self.batch_tokens // max_seq_length)

    def chunk(self, *, vocabulary: int, tokens: int, on_cpu: bool) -> int | None:
        """Tokens whose logits exist at once, in batches of `tokens`; None = all."""
        if self.loss_chunk_tokens != "auto":
            return self.loss_chunk_tokens
        if on_cpu:
            return max(64, CACHED_LOGITS // vocabulary)
        if vocabulary * tokens < MANY_LOGITS:
            return None
        return max(64, CHUNK_LOGITS // vocabulary)
