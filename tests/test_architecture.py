"""The structure of the code: layers, import cycles, lazy libraries, sizes, and recipe
keys that nothing reads.

`python tests/test_architecture.py` prints the picture of it for docs/design.md.
"""

import ast
import shutil
from functools import cache
from itertools import chain, count
from pathlib import Path

import lmx
import pytest
from lmx.config import schema
from lmx.config.base import ConfigModel
from lmx.config.draft import DraftThresholds
from lmx.config.evaluate import EvaluationThresholds
from lmx.pipeline.draft.benchmark import DRAFT_THRESHOLDS
from lmx.pipeline.evaluate.evaluator import THRESHOLDS as EVALUATION_THRESHOLDS

THRESHOLDS = {
    EvaluationThresholds: EVALUATION_THRESHOLDS,
    DraftThresholds: DRAFT_THRESHOLDS,
}
ROOT = Path(lmx.__file__).parent
LINES, FUNCTION_LINES = 800, 100
# A module imports its own package and the layers below it, not the packages beside its
# own. The lowest layer comes first.
LAYERS = [
    "errors version installation",
    "interfaces launcher",
    "config",
    "files cpu",
    "data",
    "models",
    "generation",
    "quantization training",
    "run",
    "draft evaluation convert",
    "pipeline serving",
    "api",
    "cli",
]
RANKS = {part: rank for rank, layer in enumerate(LAYERS) for part in layer.split()}
# The only modules that import a slow library, and they do so inside a function.
LAZY = {
    "mlx_lm": {
        *("models/loader.py", "evaluation/lm_eval.py", "convert/exporters/"),
        *("serving/chat_output.py", "cli/verification/speed.py"),
    },
    "lm_eval": {"evaluation/lm_eval.py"},
    "transformers": {
        *("models/loader.py", "models/config_check.py"),
        *("convert/", "data/chat/rendering.py"),
    },
    "datasets": {"data/hub_datasets.py"},
    "rich": {"run/logger.py"},
    "wandb": {"run/wandb_tracker.py"},
    "tensorboardX": {"run/tensorboard_tracker.py"},
    "trackio": {"run/trackio_tracker.py"},
    "mlflow": {"run/mlflow_tracker.py"},
    "llguidance": {"generation/grammar_matcher.py"},
}
# The first calls foreign programs, whose errors must not stop a run. The second sends
# the error of a function to another process, which raises its own. The third gives an
# error of its thread to the thread that waits, or logs it and serves other requests.
TOLERANT = {"run/trackers.py", "training/rewards.py", "serving/engine_thread.py"}
BROAD = {"Exception", "BaseException"}


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
    """Imports that do not point down; only lmx itself is above all layers."""
    faults = []
    for name, targets in graph.items():
        package = name.split(".")[0]
        for target, line in targets.items():
            other = target.split(".")[0]
            is_down = not target or RANKS[other] < RANKS.get(package, len(LAYERS))
            if not is_down and other != package:
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


def picture(root: Path) -> str:
    """The packages from the highest layer to the lowest, with their folders."""
    names = [layer.split() for layer in reversed(LAYERS)]
    shown = [f"{{{', '.join(parts)}}}" if parts[1:] else parts[0] for parts in names]
    rows = ["```", " > ".join(shown), "```", ""]
    rows += ["| package | content | folders |", "|---|---|---|"]
    for name in chain(*names):
        folder = root / name
        if not folder.is_dir():
            continue
        text = ast.get_docstring(parse(folder / "__init__.py"))
        content = text.splitlines()[0].partition(". ")[0].rstrip(".")
        inner = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
        folders = " ".join(f"`{part}/`" for part in inner)
        rows.append(f"| `{name}/` | {content} | {folders} |")
    return "\n".join(rows)


FILES = modules(ROOT)
DESIGN = Path(__file__).parents[1] / "docs/design.md"


def test_the_design_page_shows_the_structure():
    assert picture(ROOT) in DESIGN.read_text()


def test_a_new_folder_changes_the_picture(tmp_path):
    shutil.copytree(ROOT / "models", tmp_path / "models")
    before = picture(tmp_path)
    (tmp_path / "models/new").mkdir()
    (tmp_path / "models/new/__init__.py").touch()
    assert picture(tmp_path) == before.replace("`lora/`", "`lora/` `new/`")


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


def test_a_planted_import_of_the_package_beside_is_found():
    graph = {
        "quantization.qat": {"training.step": 3, "quantization.packing": 4},
        "quantization.packing": {"generation": 5},
    }
    assert upward_imports(graph) == ["quantization.qat:3 imports training.step"]


def module_level(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that run when a module is imported, those of classes included."""
    statements = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            statements += module_level(node.body)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            statements.append(node)
    return statements


@cache
def nodes(kind: type) -> list[tuple[str, ast.AST]]:
    """Of all files: the file, and a node of a kind."""
    return [
        (path.relative_to(ROOT).as_posix(), node)
        for path in FILES.values()
        for node in ast.walk(parse(path))
        if isinstance(node, kind)
    ]


def test_slow_libraries_are_imported_lazily_and_in_one_place():
    faults = []
    for name, path in FILES.items():
        file = path.relative_to(ROOT).as_posix()
        eager = {
            node.lineno
            for statement in module_level(parse(path).body)
            for node in ast.walk(statement)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        for target, line in imported_names(name, path):
            places = LAZY.get(target.split(".")[0])
            if places and (line in eager or not file.startswith(tuple(places))):
                faults.append(f"{file}:{line} {target}")
    assert faults == []


def test_files_and_functions_are_short():
    files = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {k: v for k, v in files.items() if v > LINES} == {}
    lengths = {
        f"{file}:{node.name}": node.end_lineno - node.lineno + 1
        for file, node in nodes(ast.FunctionDef)
    }
    assert {k: v for k, v in lengths.items() if v > FUNCTION_LINES} == {}


def test_broad_except_clauses_raise():
    broad = [
        f"{file}:{node.lineno}"
        for file, node in nodes(ast.ExceptHandler)
        if file not in TOLERANT
        and (not node.type or ast.unparse(node.type) in BROAD)
        and not any(isinstance(inner, ast.Raise) for inner in node.body)
    ]
    assert broad == []


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


def test_all_output_passes_the_terminal_module():
    found = {name: direct_output(parse(path)) for name, path in FILES.items()}
    del found["run.terminal"]
    assert {name: lines for name, lines in found.items() if lines} == {}


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


def test_every_recipe_key_is_read():
    unread = []
    for model in set(config_models()) - {schema.StageEntry}:
        keys = set(vars(model).get("__annotations__", {})) & set(model.model_fields)
        # Thresholds are read together: each is paired with a measurement.
        read = THRESHOLDS[model] if model in THRESHOLDS else attributes_read()
        unread += [f"{model.__qualname__}.{key}" for key in keys - set(read)]
    assert unread == []


def test_every_recipe_key_has_a_description():
    for model in config_models():
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__qualname__}.{name}"


if __name__ == "__main__":
    print(picture(ROOT))
