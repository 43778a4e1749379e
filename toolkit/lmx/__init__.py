"""lmx: train, quantize, distil and run language models on MLX.

```python
import lmx

run = lmx.train("qat_4bit", overrides={"stages.train.steps": 50})
model = lmx.load(run)
print(lmx.generate(model, "Dim the kitchen lamp to 30 at half past seven").text)
```

The names are imported when they are first used, so that `import lmx` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api.checking import Check, check
    from .api.evaluation import Evaluation, evaluate
    from .api.generation import generate
    from .api.jobs import export, make_draft, quantize, train
    from .api.model import Model, load
    from .api.recipe import Recipe
    from .api.run import Run, open_run
    from .config.errors import ConfigErrors
    from .errors import UserError
    from .run.callbacks import Callback, RunState

__all__ = [
    "Callback",
    "Check",
    "ConfigErrors",
    "Evaluation",
    "Model",
    "Recipe",
    "Run",
    "RunState",
    "UserError",
    "__version__",
    "check",
    "evaluate",
    "export",
    "generate",
    "load",
    "make_draft",
    "open_run",
    "quantize",
    "train",
]
_NAMES = {
    "api.checking": ("Check", "check"),
    "api.evaluation": ("Evaluation", "evaluate"),
    "api.generation": ("generate",),
    "api.jobs": ("export", "make_draft", "quantize", "train"),
    "api.model": ("Model", "load"),
    "api.recipe": ("Recipe",),
    "api.run": ("Run", "open_run"),
    "config.errors": ("ConfigErrors",),
    "errors": ("UserError",),
    "run.callbacks": ("Callback", "RunState"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'lmx' has no attribute '{name}'")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
