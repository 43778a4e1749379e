"""Errors that a user can cause and fix, and the exit codes of the commands."""

USAGE = 2
FAILED = 1
WILL_NOT_FIT = 3
INTERRUPTED = 130


class UserError(Exception):
    """An error that the user can fix; printed without a traceback.

    Args:
        message: what is wrong, in one sentence.
        hint: how to fix it.
        place: the location, as ``file:line:col`` or a path.
        code: the exit code of the command (2 recipe or usage, 1 the run failed,
            3 does not fit in memory or on disk).
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        place: str | None = None,
        code: int = USAGE,
    ):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.place = place
        self.code = code

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        return f"{text}\n    hint: {self.hint}" if self.hint else text


class Interrupted(Exception):
    """The user stopped the run; everything needed to resume is on disk."""
