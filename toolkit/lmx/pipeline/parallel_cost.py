"""What several processes exchange and hold, and how long a step of them takes.

An all-reduce costs what `Link` says; an all-gather or a reduce-scatter half of that.
With P parameters, T trained ones and c bytes of the compute dtype, a step exchanges:

    data parallel     an all-reduce of the gradients, 4 T
    fsdp              an all-gather of c P, twice with gradient checkpointing, and a
                      reduce-scatter of 4 P
    tensor parallel   two all-reduces in every block, after attention and after the MLP
                      (Megatron-LM, arXiv 1909.08053), and one after the embedding, of
                      c width tokens each; an all-gather of the logits
"""

from dataclasses import dataclass
from math import ceil

from ..evaluation.network_bandwidth import Link
from ..run.distributed import BUCKET_BYTES


@dataclass(frozen=True)
class Traffic:
    """What a process exchanges in a step.

    Attributes:
        all_reduced: bytes of the arrays of all-reduces.
        all_reduces: their number.
        gathered: bytes of the full arrays of all-gathers and reduce-scatters.
        gathers: their number.
    """

    all_reduced: int = 0
    all_reduces: int = 0
    gathered: int = 0
    gathers: int = 0

    def sent(self, processes: int) -> int:
        """Bytes that every process sends."""
        share = (processes - 1) / processes
        return int(share * (2 * self.all_reduced + self.gathered))

    def seconds(self, processes: int, link: Link) -> float:
        """The time of all collectives, if nothing else runs beside them."""
        messages = (processes - 1) * (2 * self.all_reduces + self.gathers)
        sent = self.sent(processes) / link.bytes_per_second
        return messages * link.message_seconds + sent


def data_parallel(trained: int) -> Traffic:
    """Of a training step; T parameters have gradients."""
    size = 4 * trained
    return Traffic(all_reduced=size, all_reduces=ceil(size / BUCKET_BYTES))


def fsdp(parameters: int, blocks: int, compute: int, *, checkpointing: bool) -> Traffic:
    """Of a training step with sharded parameters.

    Args:
        blocks: that are gathered each by itself.
        compute: bytes of the compute dtype.
        checkpointing: every block runs, and is gathered, twice.
    """
    passes = 1 + checkpointing
    size = (passes * compute + 4) * parameters
    return Traffic(gathered=size, gathers=(passes + 1) * blocks)
