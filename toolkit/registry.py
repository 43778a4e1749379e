"""A folder as a registry: every module that defines the wanted name is an entry."""

import ast
import importlib
import pkgutil
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def entries(package: str, attribute: str) -> dict[str, ModuleType]:
    """The modules of `package` that define `attribute`, by file name.

    Others in the folder are not imported, for what they need may be heavy. An import
    error in a module is raised: a method that cannot be imported must not vanish from
    the list.
    """
    folder = importlib.import_module(package)
    return {
        info.name: importlib.import_module(f"{package}.{info.name}")
        for info in sorted(pkgutil.iter_modules(folder.__path__), key=lambda i: i.name)
        if not info.ispkg
        and _defines(Path(info.module_finder.path) / f"{info.name}.py", attribute)
    }


def _defines(file: Path, name: str) -> bool:
    """Whether something of this name is made at the top of a module."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        match statement:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if (
                found == name
            ):
                return True
            case ast.Assign(targets=targets):
                if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                    return True
            case ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                return True
    return False
