"""Tensors of a file against the parameters that they are loaded into."""

import mlx.core as mx

from ..errors import UserError


def require_tensors(
    tensors: dict[str, mx.array],
    required: dict[str, mx.array],
    *,
    place: str,
    hint: str,
) -> None:
    """Refuse tensors that are not exactly those of the parameters.

    Args:
        required: parameters by name, of which only shape and type count.

    Raises:
        UserError: naming a tensor that is missing, not a parameter, of another shape,
            or of integers.
    """
    for name in sorted(required.keys() | tensors.keys()):
        given, needed = tensors.get(name), required.get(name)
        if given is None:
            fault = f"the tensor {name} is missing"
        elif needed is None:
            fault = f"the tensor {name} is not read here"
        elif given.shape != needed.shape:
            shapes = list(given.shape), list(needed.shape)
            fault = f"{name} has the shape {shapes[0]}, here it must be {shapes[1]}"
        elif _is_float(needed) and not _is_float(given):
            fault = f"{name} has values of {given.dtype}, which are no weights"
        else:
            continue
        raise UserError(fault, place=place, hint=hint)


def _is_float(value: mx.array) -> bool:
    return mx.issubdtype(value.dtype, mx.floating)
