"""The `parallel` block: what the processes of a run divide among themselves."""

from pydantic import Field

from .base import ConfigModel

# Stages that work if several processes hold a model together.
TENSOR_PARALLEL_STAGES = ("evaluate", "quantize", "export")


class ParallelConfig(ConfigModel):
    """How the processes that `mlx.launch` starts share the work: `data` groups of
    processes have different examples, and the `tensor` processes of a group hold one
    model together. Only MPI allows both to be more than 1."""

    data: int | None = Field(None, ge=1)
    """Groups of processes with different examples. Default: all processes, divided by
    `tensor`."""
    tensor: int = Field(1, ge=1)
    """Processes that hold one model together (tensor parallelism) in `evaluate`
    stages. Its layers must be divisible by it; of `qwen3_next` and `bailing_hybrid`
    each holds some of the layers. A quantize stage holds one block at a time, and
    divides examples among all processes."""
