"""The one error a user can cause: what went wrong, where, and what to do instead."""

USAGE = 2
FAILED = 1
WILL_NOT_FIT = 3
INTERRUPTED = 130


class UserError(Exception):
    """A fault a user can mend; printed without a traceback.

    Args:
        message: what is wrong, one sentence.
        hint: what to do instead.
        place: where, as ``file:line:col`` or a path.
        code: the exit code of the command (2 recipe or usage, 1 the run failed,
            3 will not fit).
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
    """The user asked the run to stop; everything needed to go on is on disk."""
