"""The evaluate stage: measure the run's models from disk and check the thresholds."""

from collections.abc import Iterator

from ...config.data import DataConfig
from ...config.evaluate import EvaluateConfig
from ...config.messages import Problem
from ...errors import UserError
from ...evaluation import lm_eval
from ...installation import install_command
from ...interfaces import Communicator
from ...models.tensor_parallel import shard_share
from ..context import ModelArtifact, StageContext
from ..estimate import Estimate, ModelShape, Workload
from ..stage import ModelState, RawStage, Stage, missing_source
from ..work import Work

# evaluation/latency.py: generations of a measurement.
LATENCY_RUNS = 14


class EvaluateStage(Stage):
    """Measure every model of the run; a missed threshold ends the run."""

    kind = "evaluate"
    runs_on_all_ranks = True
    calls = "metrics"
    config: EvaluateConfig

    def datasets(self, data: DataConfig) -> list[str]:
        return data.valid or data.train

    @property
    def named_files(self) -> list[tuple[str, str]]:
        return [("tasks", task) for task in self.config.tasks if lm_eval.is_file(task)]

    @classmethod
    def check(cls, raw: RawStage, state: ModelState) -> Iterator[Problem]:
        yield from super().check(raw, state)
        if not (raw.data.get("valid") or raw.data.get("train")):
            hint = "name examples in data.valid or data.train"
            yield Problem(raw.path, "nothing to evaluate on", hint, of="key")
        tasks = raw.block.get("tasks")
        if isinstance(tasks, list) and tasks and not lm_eval.is_installed():
            hint, message = (
                install_command("eval"),
                "lm-evaluation-harness is not installed",
            )
            yield Problem((*raw.path, "tasks"), message, hint, "key")
        for path, task in raw.items("tasks"):
            if lm_eval.is_file(task) and raw.find(task) is None:
                yield missing_source(path, task, raw.find)

    def check_ranks(self, ranks: Communicator) -> None:
        if self.config.tasks and ranks.size > 1:
            raise UserError(
                "lm-evaluation-harness tasks run in one process, and this run has "
                f"{ranks.size}",
                hint="leave `tasks` out, and evaluate the model in a second run",
            )

    def remote_checks(self) -> None:
        lm_eval.require(self.config.tasks)

    def estimate(self, workload: Workload, current: ModelShape) -> Estimate:
        shape, processes = workload.shape, workload.tensor
        weights = shape.parameters
        held = shard_share(shape.model(), processes) if processes > 1 else 1.0
        # Two models and the reference of one, without exact matches: how many examples
        # have one correct answer is known once they are read.
        passes = 2 * weights * 3 * self.config.num_tokens
        generated = 2 * LATENCY_RUNS * (self.config.latency_tokens or 0)
        decoding = 2 * weights * generated
        return Estimate(
            current,
            {"models": int(held * 2 * 4 * weights)},
            work=Work(forward=passes, decoded=decoding),
        )

    def run(self, context: StageContext) -> ModelArtifact:
        """Measure the models, log the table, write report.json, check the thresholds.

        Raises:
            UserError: a threshold is missed; its code is 1.
        """
        # Imported here, so that a recipe is checked without the libraries of a run.
        from .evaluator import Evaluator

        evaluator = Evaluator(self.config, context)
        evaluator.measure(evaluator.loaders)
        if context.ranks.is_first:
            evaluator.check()
        return context.current
