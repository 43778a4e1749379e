"""Errors of the endpoint, in OpenAI's form."""

from ..errors import FAILED, UserError, shorten

INVALID, OVERLOADED = "invalid_request_error", "overloaded_error"
SERVER = "server_error"


class ApiError(Exception):
    """An answer with an error.

    Args:
        status: of HTTP.
        param: the parameter that is wrong.
        code: a word for programs, such as "unknown_parameter".
        kind: OpenAI's type of error.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code, self.kind = param, code, kind
        self.headers = headers or {}

    def to_json(self) -> dict:
        """The body of the answer."""
        error = {"message": self.message, "type": self.kind}
        return {"error": error | {"param": self.param, "code": self.code}}

    @classmethod
    def from_user_error(
        cls, error: UserError, *, param: str | None = None
    ) -> "ApiError":
        """A request that the engine or the model refuses, or that failed."""
        hint = f" ({error.hint})" if error.hint else ""
        place = error.place or ""
        # Other places are files of the server.
        is_inside = param is not None and place.startswith(param)
        prefix = f"{place}: " if is_inside else ""
        message = shorten(f"{prefix}{error.message}{hint}")
        # Such as predictions that are NaN: not the client's fault.
        status, kind = (500, SERVER) if error.code == FAILED else (400, INVALID)
        param = place if is_inside else param
        return cls(status, message, param=param, kind=kind)


def no_model(name: str) -> ApiError:
    """The error for a model that is not served."""
    message = f"The model {name!r} does not exist"
    return ApiError(404, message, param="model", code="model_not_found")
