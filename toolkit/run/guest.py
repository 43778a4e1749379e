"""In the place of run folder and report where a process neither writes nor tells."""

from pathlib import Path

from .report import Report


class SilentReport(Report):
    """Tells nobody anything: the first process does."""

    def __init__(self):
        super().__init__(None, quiet=True)

    def _show(self, text: str, *, to=None) -> None:
        pass


class GuestFolder:
    """The run folder as a place alone, which only the first process writes to."""

    died = None

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> "GuestFolder":
        return self

    def __exit__(self, *_) -> None:
        pass

    def stage_folder(self, stage: str) -> Path:
        """The folder of a stage, seen from here or not."""
        return self.path / "stages" / stage

    def finished(self, stage: str, warn) -> None:
        """Nothing is known here."""

    def set_status(self, status: str) -> None:
        """The first process records it, as all else."""

    enter = set_status

    def finish(self, stage: str, facts: dict, artefacts: list[Path]) -> None:
        """See `set_status`."""

    def forget(self, stages: list[str]) -> None:
        """See `set_status`."""
