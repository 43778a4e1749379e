"""What goes wrong when a step is traced, in our words."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import UserError


@contextmanager
def explained() -> Iterator[None]:
    """Nothing is computed yet: what goes wrong in a trace is the model's fault."""
    try:
        yield
    except (RuntimeError, ValueError, AttributeError) as error:
        raise UserError(
            f"this architecture cannot be trained here: {str(error).splitlines()[0]}",
            hint="its code in mlx-lm has no gradient, or reads an adapted layer's "
            "weight itself; adapter.layers: auto leaves such layers out",
        ) from error
