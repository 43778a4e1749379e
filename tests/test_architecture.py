"""The house rules: arrows point down, files and functions stay small, heavy libraries
have one door each, and every key of a recipe does something."""

import ast
from functools import cache
from pathlib import Path

import pytest

import toolkit
from toolkit.recipe import schema
from toolkit.registry import entries
from toolkit.section import Section
from toolkit.stages import measuring, validate

ROOT = Path(toolkit.__file__).parent
FILES = sorted(
    p for p in ROOT.rglob("*.py") if "shipped" not in p.relative_to(ROOT).parts
)
LINES, FUNCTION_LINES = 300, 60

# Rank of every part: an import may point to a lower rank, or stay within one part.
# Parts of the same rank in the middle may use each other.
BASE, MIDDLE, STAGES, RECIPE, TOP = range(5)
FLOORS = {
    BASE: "allocator errors section registry linkage blas run __init__",
    MIDDLE: "data model train quant draft generate measure export doctor",
    STAGES: "stages",
    RECIPE: "recipe",
    TOP: "cli",
}
RANKS = {part: rank for rank, parts in FLOORS.items() for part in parts.split()}
# Who may import what; everything here is slow to import, and imported inside functions.
DOORS = {
    "mlx_lm": {"model/load.py", "measure/harness.py", "export/"},
    "lm_eval": {"measure/harness.py"},
    "transformers": {"model/load.py", "export/"},
    "datasets": {"data/formats.py"},
    "rich": {"run/report.py"},
    "wandb": {"run/trackers/wandb.py"},
}
# Where programs of others are called whose faults, of whatever kind, must end nothing.
TOLERANT = {"run/tracking.py"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> list[tuple[str, int, bool]]:
    """Full name, line and whether it is at the top, of every import of a file."""
    package = ["toolkit", *path.relative_to(ROOT).parts[:-1]]
    top = set(ast.walk(ast.Module(_at_import(tree(path)), [])))
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(name, node.lineno, node in top) for name in names]
    return found


def _at_import(module: ast.Module) -> list[ast.stmt]:
    """The statements that run when the module is imported, classes included."""
    found = []
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            found += _at_import(node)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node)
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_arrows_point_down(path):
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for name, line, _ in imports(path):
        if not name.startswith("toolkit."):
            continue
        target = name.split(".")[1]
        target = target if target in RANKS else "__init__"
        allowed = target == part or RANKS[target] < RANKS[part]
        allowed |= RANKS[target] == RANKS[part] and RANKS[part] in (BASE, MIDDLE)
        assert allowed, f"{name_of(path)}:{line}: {part} imports {name}"


def test_the_lowest_floor_stands_alone():
    """errors, section and registry import nothing of ours; run and blas only those."""
    for path in FILES:
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        ours = {n.split(".")[1] for n, _, _ in imports(path) if "toolkit." in n}
        if part in ("errors", "section", "registry", "linkage", "__init__"):
            assert not ours, name_of(path)
        if part == "run":
            assert ours <= {"run", "errors", "section"}, name_of(path)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_heavy_libraries_have_one_door_and_are_lazy(path):
    for name, line, at_top in imports(path):
        library = name.split(".")[0]
        if library in DOORS:
            here = f"{name_of(path)}:{line} imports {name}"
            assert name_of(path).startswith(tuple(DOORS[library])), here
            assert not at_top, f"{here} when it is imported itself"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_sizes(path):
    lines = len(path.read_text().splitlines())
    assert lines <= LINES, f"{lines} lines"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{node.name}: {length} lines"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_fault_is_swallowed(path):
    """Who catches everything must raise it again."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            broad = caught in ("everything", "Exception", "BaseException")
            raises = any(isinstance(inner, ast.Raise) for inner in node.body)
            tolerant = name_of(path) in TOLERANT
            assert raises or tolerant or not broad, (
                f"line {node.lineno} catches {caught}"
            )


def sections() -> list[type[Section]]:
    """Every block a recipe can hold."""
    found, waiting = [], [Section]
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        found += [c for c in below if c.__module__.startswith("toolkit.")]
    assert schema.Recipe in found
    return sorted(set(found), key=lambda c: (c.__module__, c.__qualname__))


@cache
def reads() -> set[str]:
    """Names of the attributes that are read; to validate a value is not to use it."""
    found = set()
    for path in FILES:
        nodes = list(ast.walk(tree(path)))
        ignored = {
            inner
            for node in nodes
            if isinstance(node, ast.FunctionDef) and _validates(node)
            for inner in ast.walk(node)
        }
        found |= {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and node not in ignored
        }
    return found


def _validates(function: ast.FunctionDef) -> bool:
    return any("validator" in ast.unparse(d) for d in function.decorator_list)


@pytest.mark.parametrize("section", sections(), ids=lambda c: c.__qualname__)
def test_every_key_is_read(section):
    keys = set(vars(section).get("__annotations__", {})) & set(section.model_fields)
    if section is schema.Stage:
        # Read by its one key: the stage of that name runs.
        stages = {field.alias or key for key, field in section.model_fields.items()}
        assert stages == set(entries("toolkit.stages", "run"))
    elif section is validate.Gates:
        # Read all together: each is matched with a figure and a direction.
        assert keys == set(measuring.GATES)
    else:
        assert keys <= reads(), f"nobody reads {sorted(keys - reads())}"


def test_every_key_is_explained():
    for section in sections():
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__qualname__}.{name}"
