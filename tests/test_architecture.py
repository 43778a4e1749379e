"""The structure of the code: layers, import cycles, lazy libraries, sizes, and recipe
keys that nothing reads."""

import ast
from functools import cache
from itertools import count
from pathlib import Path

import lmx
import pytest
from lmx.config import schema
from lmx.config.base import ConfigModel
from lmx.config.draft import DraftThresholds
from lmx.config.evaluate import EvaluationThresholds
from lmx.pipeline.draft.benchmark import DRAFT_THRESHOLDS
from lmx.pipeline.evaluate.thresholds import THRESHOLDS as EVALUATION_THRESHOLDS

THRESHOLDS = {
    EvaluationThresholds: EVALUATION_THRESHOLDS,
    DraftThresholds: DRAFT_THRESHOLDS,
}
ROOT = Path(lmx.__file__).parent
LINES, FUNCTION_LINES = 500, 60
# A module imports its own layer and the layers below it. The lowest layer comes first.
LAYERS = [
    "errors version",
    "config",
    "run cpu",
    "data",
    "models",
    "quantization training generation",
    "draft evaluation convert",
    "pipeline",
    "api",
    "cli",
]
RANKS = {part: rank for rank, layer in enumerate(LAYERS) for part in layer.split()}
# The only modules that import a slow library, and they do so inside a function.
LAZY = {
    "mlx_lm": {"models/loader.py", "evaluation/lm_eval.py", "convert/exporters/"},
    "lm_eval": {"evaluation/lm_eval.py"},
    "transformers": {
        *("models/loader.py", "models/transformers_config.py"),
        *("convert/", "data/chat/rendering.py"),
    },
    "datasets": {"data/hub_datasets.py"},
    "rich": {"run/logger.py"},
    "wandb": {"run/wandb_tracker.py"},
    "tensorboardX": {"run/tensorboard_tracker.py"},
    "trackio": {"run/trackio_tracker.py"},
    "mlflow": {"run/mlflow_tracker.py"},
}
# The first calls foreign programs, whose errors must not stop a run. The second sends
# the error of a function to another process, which raises its own.
TOLERANT = {"run/trackers.py", "training/reward_worker.py"}


def modules(root: Path) -> dict[str, Path]:
    """Files by dotted name below the package, e.g. "run.logger"; "" is the package."""
    files = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] != "shipped":
            files[".".join(p for p in parts if p != "__init__")] = path
    return files


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_names(name: str, path: Path) -> list[tuple[str, int]]:
    """Full dotted name and line of every import of a file, however deep it stands."""
    package = ["lmx", *filter(None, name.split("."))]
    if path.name != "__init__.py":
        package.pop()
    names = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            names += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return names


def import_graph(root: Path) -> dict[str, dict[str, int]]:
    """Of every module, the modules of the package that it imports, and the line."""
    files = modules(root)
    graph: dict[str, dict[str, int]] = {}
    for name, path in files.items():
        graph[name] = {}
        for target, line in imported_names(name, path):
            if target != "lmx" and not target.startswith("lmx."):
                continue
            target = target.removeprefix("lmx").removeprefix(".")
            # The last part may be a name inside a module.
            target = target if target in files else target.rpartition(".")[0]
            if target != name:
                graph[name][target] = line
    return graph


def upward_imports(graph: dict[str, dict[str, int]]) -> list[str]:
    """Imports of a higher layer; only the package itself is above them all."""
    faults = []
    for name, targets in graph.items():
        rank = RANKS.get(name.split(".")[0], len(LAYERS))
        for target, line in targets.items():
            if target and RANKS[target.split(".")[0]] > rank:
                faults.append(f"{name}:{line} imports {target}")
    return faults


def import_cycles(graph: dict[str, dict[str, int]]) -> list[list[str]]:
    """Strongly connected modules (Tarjan's algorithm)."""
    index, low, stack, cycles, counter = {}, {}, [], [], count()

    def visit(name: str) -> None:
        index[name] = low[name] = next(counter)
        stack.append(name)
        for target in graph.get(name, ()):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            cycle = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(cycle) > 1:
                cycles.append(sorted(cycle))

    for name in graph:
        if name not in index:
            visit(name)
    return cycles


FILES = modules(ROOT)
each_file = pytest.mark.parametrize("name", FILES, ids=lambda name: name or "lmx")


def test_imports_point_down():
    assert not upward_imports(import_graph(ROOT))


def test_imports_have_no_cycle():
    assert not import_cycles(import_graph(ROOT))


PLANTED = [
    "from ..pipeline import runner",
    "def f():\n    from ..pipeline import runner",
    "from typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from ..pipeline import runner",
]


@pytest.mark.parametrize("text", PLANTED, ids=["top", "function", "type checking"])
def test_a_planted_upward_import_and_a_planted_cycle_are_found(text, tmp_path):
    for name, source in {
        "models/loader.py": text,
        "pipeline/runner.py": "from ..models import loader",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    graph = import_graph(tmp_path)
    line = text.count("\n") + 1
    assert upward_imports(graph) == [f"models.loader:{line} imports pipeline.runner"]
    assert import_cycles(graph) == [["models.loader", "pipeline.runner"]]


def module_level(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that run when a module is imported, those of classes included."""
    statements = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            statements += module_level(node.body)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            statements.append(node)
    return statements


@each_file
def test_slow_libraries_are_imported_lazily_and_in_one_place(name):
    path = FILES[name]
    eager = {
        node.lineno
        for statement in module_level(parse(path).body)
        for node in ast.walk(statement)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    for target, line in imported_names(name, path):
        library = target.split(".")[0]
        if library in LAZY:
            file = path.relative_to(ROOT).as_posix()
            assert file.startswith(tuple(LAZY[library])), f"{file}:{line} {target}"
            assert line not in eager, f"{file}:{line} imports {target} at once"


@each_file
def test_files_and_functions_are_short(name):
    path = FILES[name]
    lines = len(path.read_text().splitlines())
    assert lines <= LINES, f"{lines} lines"
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{node.name}: {length} lines"


@each_file
def test_broad_except_clauses_raise(name):
    path = FILES[name]
    tolerant = path.relative_to(ROOT).as_posix() in TOLERANT
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            broad = caught in ("everything", "Exception", "BaseException")
            raises = any(isinstance(inner, ast.Raise) for inner in node.body)
            assert raises or tolerant or not broad, (
                f"line {node.lineno} catches {caught}"
            )


PRINTS = {"print", "input", "breakpoint"}
STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}


def direct_output(tree: ast.Module) -> list[int]:
    """Lines that print, or that name a standard output."""
    lines = []
    for node in ast.walk(tree):
        match node:
            case (
                ast.Call(func=ast.Name(id=name))
                | ast.Attribute(value=ast.Name(id="traceback"), attr=name)
            ) if name in PRINTS or name.startswith("print_"):
                lines.append(node.lineno)
            case ast.Attribute(value=ast.Name(id="sys"), attr=name) if name in STREAMS:
                lines.append(node.lineno)
            case ast.ImportFrom(module="sys", names=names):
                lines += [node.lineno for n in names if n.name in STREAMS]
    return lines


@each_file
def test_all_output_passes_the_terminal_module(name):
    if name != "run.terminal":
        assert direct_output(parse(FILES[name])) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    print(1)",
        "import sys\nsys.stdout.write('x')",
        "import sys\nwrite = sys.stderr.write",
        "import sys\nf(file=sys.__stdout__)",
        "import traceback\ntraceback.print_exc()",
        "\nfrom sys import stdout",
    ],
)
def test_planted_output_is_found(text):
    assert direct_output(ast.parse(text)) == [2]
    assert direct_output(ast.parse("import sys\nsys.stdin.read()\nf.print()")) == []


def test_class_names_are_unique():
    places: dict[str, list[str]] = {}
    for name, path in FILES.items():
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    assert {k: v for k, v in places.items() if len(v) > 1} == {}


def config_models() -> list[type[ConfigModel]]:
    """Every block that a recipe can have."""
    models, waiting = [], [ConfigModel]
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        models += [c for c in below if c.__module__.startswith("lmx.")]
    assert schema.RecipeConfig in models
    return sorted(set(models), key=lambda c: (c.__module__, c.__qualname__))


@cache
def attributes_read() -> set[str]:
    """Names of attributes that are read outside validators."""
    names = set()
    for path in FILES.values():
        nodes = list(ast.walk(parse(path)))
        ignored = {
            inner
            for node in nodes
            if isinstance(node, ast.FunctionDef) and is_validator(node)
            for inner in ast.walk(node)
        }
        names |= {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and node not in ignored
        }
    return names


def is_validator(function: ast.FunctionDef) -> bool:
    return any("validator" in ast.unparse(d) for d in function.decorator_list)


@pytest.mark.parametrize("model", config_models(), ids=lambda c: c.__qualname__)
def test_every_recipe_key_is_read(model):
    keys = set(vars(model).get("__annotations__", {})) & set(model.model_fields)
    if model in THRESHOLDS:
        # Read together: each is paired with a measurement.
        assert keys == set(THRESHOLDS[model])
    elif model is not schema.StageEntry:
        unread = sorted(keys - attributes_read())
        assert not unread, f"nothing reads {unread}"


def test_every_recipe_key_has_a_description():
    for model in config_models():
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__qualname__}.{name}"
