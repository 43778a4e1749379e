"""Plan generation and training of 8B, 70B and 671B models on several machines.

Nothing runs: the formulas are those of dry runs (lmx.pipeline.parallel_cost), from the
shapes of the models and the figures of the machines below. The tables of
docs/distributed.md are its output.
"""

from dataclasses import dataclass
from functools import cache

from lmx.config.quantize import RTNConfig
from lmx.config.train import TrainConfig
from lmx.evaluation.network_bandwidth import Link
from lmx.models.loader import build_model
from lmx.models.tensor_parallel import shard_share
from lmx.pipeline.estimate import BatchShape, ModelShape, active_weights, matrix_shapes
from lmx.pipeline.parallel_cost import Traffic
from lmx.pipeline.train.estimate import training_cost, training_traffic

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
WIDER = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}
MODELS = {"8B": LLAMA, "70B": LLAMA | WIDER, "671B": DEEPSEEK}
COUNTS = (2, 4, 8)
# Of what the makers state, the share that a step reaches.
EFFICIENCY = {"memory": 0.8, "compute": 0.5, "network": 0.8}
COMPUTE_BYTES, PROMPT, LENGTH = 2, 2048, 2048
# Tokens of a training step, over all machines.
BATCH = 8 * LENGTH
HEADER = (
    "| model | machines | 4 bits: GB each | token | prompt | LoRA: GB each | step "
    "| full, fsdp: GB each | step |\n|---|" + "---:|" * 8
)


@dataclass(frozen=True)
class Machine:
    """A machine and its network, as their makers state them.

    Attributes:
        memory: bytes.
        bandwidth: bytes per second of its memory.
        compute: operations per second in 16 bits.
        link: between two of them.
    """

    name: str
    memory: float
    bandwidth: float
    compute: float
    link: Link


MACHINES = (
    Machine(
        "Mac Studio, M3 Ultra, 512 GB; Thunderbolt 5 with RDMA (JACCL)",
        512e9,
        819e9,
        28e12,
        Link(10e-6, 10e9),
    ),
    Machine(
        "H100 of 80 GB in each machine; 400 Gb/s (NCCL)",
        80e9,
        3.35e12,
        989e12,
        Link(20e-6, 50e9),
    ),
    Machine(
        "Linux, 64 cores, 512 GB; Ethernet of 10 Gb/s (ring)",
        512e9,
        400e9,
        5e12,
        Link(50e-6, 1.25e9),
    ),
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what it waits for.

    Attributes:
        memory: to read the weights.
        compute: of the operations, during which the weights are read too.
        network: of the collectives, which come one after the other with the rest.
    """

    memory: float
    compute: float
    network: float

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return max(self.memory, self.compute) + self.network

    @property
    def limit(self) -> str:
        """What takes the longest: memory, compute or network."""
        return max(vars(self), key=vars(self).get)


def tensor_parallel(
    blocks: int, width: int, vocabulary: int, compute: int, tokens: int, predicted: int
) -> Traffic:
    """Of a forward pass.

    Args:
        compute: bytes of the compute dtype.
        tokens: that are processed.
        predicted: those whose logits are computed.
    """
    sums = 2 * blocks + 1
    return Traffic(
        all_reduced=sums * width * tokens * compute,
        all_reduces=sums,
        gathered=vocabulary * predicted * compute,
        gathers=1,
    )


class ModelPlan:
    """What a model needs, from its shapes."""

    def __init__(self, config: dict):
        model = build_model(config)
        dense = ModelShape(config, 0)
        self.dense = ModelShape(config, COMPUTE_BYTES * dense.parameters)
        specs = self.dense.selection(RTNConfig(bits=4, group_size=64)).specs
        self.quantized = self.dense.quantized(specs)
        self.active = active_weights(self.dense.experts, matrix_shapes(model))
        self.blocks = config["num_hidden_layers"]
        self.width = config["hidden_size"]
        self.vocabulary = config["vocab_size"]

    def shard(self, count: int) -> float:
        """The share of the weights in each of `count` tensor-parallel processes."""
        return shard_share(self.dense.model(), count)

    def forward(self, machine: Machine, count: int, tokens: int) -> StepTime:
        """A tensor-parallel pass over a few tokens of one sequence."""
        share = self.shard(count)
        read = share * self.quantized.bytes * self.active / self.dense.parameters
        operations = share * 2 * self.active * tokens
        traffic = tensor_parallel(
            self.blocks, self.width, self.vocabulary, COMPUTE_BYTES, tokens, 1
        )
        return step_time(machine, count, read, operations, traffic)

    def training(self, machine: Machine, count: int, **block) -> tuple[int, StepTime]:
        """Bytes of memory and the time of a training step of BATCH tokens in all."""
        config = TrainConfig(
            steps=1, batch_tokens=BATCH, gradient_checkpointing=True, **block
        )
        shape = self.dense if config.fsdp else self.quantized
        tokens = BATCH / count
        batch = BatchShape(LENGTH, int(tokens), tokens)
        cost = training_cost(shape, config, batch, COMPUTE_BYTES, count)
        traffic = training_traffic(shape, config, cost, COMPUTE_BYTES)
        seconds = step_time(machine, count, 0, cost.step.trained, traffic)
        return sum(cost.memory.values()), seconds


@cache
def plan(name: str) -> ModelPlan:
    """The plan of a model of MODELS."""
    return ModelPlan(MODELS[name])


def step_time(
    machine: Machine, count: int, read: float, operations: float, traffic: Traffic
) -> StepTime:
    """The time of a step on one of `count` machines."""
    link = machine.link
    usable = Link(link.message_seconds, EFFICIENCY["network"] * link.bytes_per_second)
    return StepTime(
        read / (EFFICIENCY["memory"] * machine.bandwidth),
        operations / (EFFICIENCY["compute"] * machine.compute),
        traffic.seconds(count, usable),
    )


def row(machine: Machine, name: str, count: int) -> str:
    """A model on `count` machines, as a row of the table."""
    model = plan(name)
    held = model.shard(count) * model.quantized.bytes
    cells = [name, str(count), gigabytes(held, machine)]
    for tokens in (1, PROMPT):
        cells.append(time_of(model.forward(machine, count, tokens), held, machine))
    for block in ({"adapter": {"type": "lora", "rank": 16}}, {"fsdp": True}):
        memory, step = model.training(machine, count, **block)
        cells += [gigabytes(memory, machine), time_of(step, memory, machine)]
    return f"| {' | '.join(cells)} |"


def gigabytes(size: float, machine: Machine) -> str:
    """A size; in parentheses if it does not fit."""
    text = f"{size / 1e9:,.0f}"
    return text if size <= machine.memory else f"({text})"


def time_of(step: StepTime, size: float, machine: Machine) -> str:
    """The time of a step with what limits it; a dash if it does not fit."""
    if size > machine.memory:
        return "-"
    seconds = step.seconds
    if seconds < 1:
        text = f"{seconds * 1e3:.3g} ms"
    else:
        text = f"{seconds:,.0f} s" if seconds > 100 else f"{seconds:.3g} s"
    return f"{text}, {step.limit}"


def main() -> None:
    """Print a table for every kind of machine."""
    for machine in MACHINES:
        print(f"\n{machine.name}:\n\n{HEADER}")
        for name in MODELS:
            for count in COUNTS:
                print(row(machine, name, count))


if __name__ == "__main__":
    main()
