"""A folder as a registry: every module that holds the wanted name is an entry."""

import importlib
import pkgutil
from functools import cache
from types import ModuleType


@cache
def entries(package: str, attribute: str) -> dict[str, ModuleType]:
    """The modules of `package` that define `attribute`, by file name.

    An import error in a module is raised: a method that cannot be imported must not
    vanish from the list.
    """
    folder = importlib.import_module(package)
    found = {}
    for info in sorted(pkgutil.iter_modules(folder.__path__), key=lambda i: i.name):
        module = importlib.import_module(f"{package}.{info.name}")
        if hasattr(module, attribute):
            found[info.name] = module
    return found
