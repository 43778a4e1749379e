"""The mesh of processes: data by tensor parallel, as torchtitan's ParallelDims.

A rank's place is (rank // tensor, rank % tensor): the processes of a tensor group
follow each other, because they exchange the most.
"""

from dataclasses import dataclass

from .. import launcher
from ..config.parallel import ParallelConfig
from ..errors import UserError
from ..interfaces import SINGLE_PROCESS, Communicator


@dataclass(frozen=True)
class ParallelDims:
    """The groups that a process belongs to.

    Attributes:
        world: all processes of the run.
        data: processes with other examples, in whose sums every example counts once.
        tensor: processes that hold one model together.
    """

    world: Communicator = SINGLE_PROCESS
    data: Communicator = SINGLE_PROCESS
    tensor: Communicator = SINGLE_PROCESS

    @classmethod
    def build(cls, config: ParallelConfig, world: Communicator) -> "ParallelDims":
        """The mesh of a recipe's block over these processes.

        Raises:
            UserError: the run has another number of processes, or its backend cannot
                split them.
        """
        require_process_count(config, world.size)
        tensor = config.tensor
        if tensor == 1:
            return cls(world, world, SINGLE_PROCESS)
        if tensor == world.size:
            return cls(world, SINGLE_PROCESS, world)
        row, column = divmod(world.rank, tensor)
        try:
            return cls(world, world.split(column), world.split(row))
        except RuntimeError as error:
            raise UserError(
                f"{launcher.backend()} cannot split {world.size} processes into groups "
                f"of {tensor}: {error}",
                hint=f"parallel.tensor={world.size}, or 1; or start the processes with "
                "mpirun (--backend mpi), which can",
            ) from error


def require_process_count(config: ParallelConfig, size: int) -> None:
    """Raise UserError unless this number of processes fills the mesh."""
    data = config.data or max(1, size // config.tensor)
    wanted = data * config.tensor
    if wanted != size:
        raise UserError(
            f"parallel: {data} (data) x {config.tensor} (tensor) are {wanted} "
            f"processes, and this run has {size}",
            hint=f"start it with: mlx.launch -n {wanted} -- ...",
        )
