"""Identity and contract of the Python functions of a run: losses and metrics."""

import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable, Mapping
from functools import wraps
from types import CodeType
from typing import Annotated, Any

import mlx.core as mx
from pydantic import Strict

from ..data.record_formats import DataRecord
from ..errors import FAILED, UserError
from ..models.loader import LoadedModel
from ..pipeline.extensions import Loss, Metric
from .model import Model

MetricFunction = Callable[[Model, list[dict[str, Any]]], float]
Metrics = Annotated[Mapping[str, MetricFunction], Strict(False)]
# Tokens of random logits with which a loss is tested.
PROBE_TOKENS = 8
PLAIN = (bool, int, float, str, bytes, type(None))


def identity(function: Callable[..., Any], *, name: str) -> str:
    """Module, name and hash of a function, as in the `python` block of a recipe.

    The hash covers the source, default values and captured variables, as far as these
    are numbers and text. It does not cover functions that the function calls.

    Args:
        name: what the function is, for the error message.

    Raises:
        UserError: it is no function written in Python.
    """
    code = getattr(function, "__code__", None)
    if not inspect.isfunction(function) or code is None:
        raise UserError(
            f"{name} must be a function, got a {type(function).__name__}",
            hint="write a def or a lambda that calls it",
        )
    try:
        source: Any = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):  # as in exec() and in an interactive interpreter
        source = _code_facts(code)
    captured: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            captured.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            captured.append(None)
    values = [
        function.__defaults__ or (),
        sorted((function.__kwdefaults__ or {}).items()),
        captured,
    ]

    def shown(value: Any) -> str:
        return repr(value) if isinstance(value, PLAIN) else type(value).__qualname__

    facts = json.dumps([source, values], default=shown)
    digest = hashlib.sha256(facts.encode()).hexdigest()
    return f"{function.__module__}.{function.__qualname__} sha256:{digest}"


def python_block(loss: Loss | None, metrics: Metrics | None) -> dict[str, Any] | None:
    """The `python` block of a recipe with these functions; None = without any.

    Raises:
        UserError: one of them is no function written in Python.
    """
    block: dict[str, Any] = {}
    if loss is not None:
        block["loss"] = identity(loss, name="loss")
    if metrics:
        block["metrics"] = {
            name: identity(function, name=f"metrics[{name!r}]")
            for name, function in metrics.items()
        }
    return block or None


def checked_loss(function: Loss) -> Loss:
    """The loss; its errors name it.

    Raises (when called):
        UserError: it fails, does not return one number, or has no gradient.
    """
    name, tested = function.__qualname__, False

    @wraps(function)
    def loss(logits: mx.array, targets: mx.array, mask: mx.array) -> mx.array:
        nonlocal tested
        if not tested:
            tested = True
            _require_gradient(loss, logits.shape)
        try:
            total = function(logits, targets, mask)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"the loss {name} fails: {type(error).__name__}: {error}", code=FAILED
            ) from error
        is_array = isinstance(total, mx.array)
        if not is_array or total.shape or total.dtype == mx.complex64:
            got = f"{total.dtype} {total.shape}" if is_array else type(total).__name__
            raise UserError(
                f"the loss {name} must return the sum over trained tokens, a real "
                f"mx.array of shape (); got {got}",
                hint="end with mx.where(mask, losses, 0).sum()",
                code=FAILED,
            )
        return total.astype(mx.float32)

    return loss


def _require_gradient(loss: Loss, shape: tuple[int, ...]) -> None:
    """Refuse a loss that no logit changes, such as one of argmax: nothing would train.

    Args:
        shape: of the logits, which may be traced and have no values.
    """
    shape = (*(1 for _ in shape[2:]), PROBE_TOKENS, shape[-1])
    logits = mx.random.normal(shape, key=mx.random.key(0))
    targets = mx.arange(PROBE_TOKENS).reshape(shape[:-1]) % shape[-1]
    gradient = mx.grad(loss)(logits, targets, mx.ones(shape[:-1], mx.bool_))
    if not mx.any(gradient).item():
        raise UserError(
            f"the gradient of the loss {loss.__qualname__} is zero for random logits",
            hint="argmax, comparisons, .item() and mx.stop_gradient have no gradient",
            code=FAILED,
        )


def checked_metric(function: MetricFunction, name: str) -> Metric:
    """The metric as evaluate stages call it; its errors name it.

    Raises (when called):
        UserError: it fails, or does not return a number.
    """

    def measure(loaded: LoadedModel, records: list[DataRecord]) -> float:
        # The keys of each example that it has.
        examples = [
            {
                key: [dict(each) for each in value]
                if isinstance(value, tuple)
                else value
                for key, value in vars(record).items()
                if value is not None
            }
            for record in records
        ]
        try:
            return float(function(Model(loaded), examples))
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(
                f"the metric {name} fails: {type(error).__name__}: {error}", code=FAILED
            ) from error

    return measure


def _code_facts(code: CodeType) -> list[Any]:
    constants = [
        _code_facts(c) if isinstance(c, CodeType) else c for c in code.co_consts
    ]
    return [code.co_code.hex(), list(code.co_names), constants]
