"""Every stage kind is one class; no other code compares the kind of a stage."""

import ast
from pathlib import Path

import lmx.pipeline
from lmx.config.schema import StageEntry
from lmx.pipeline.plan import STAGES

PIPELINE = Path(lmx.pipeline.__file__).parent
# Variable names of a stage, its raw block and its config.
STAGE_NAMES = {"stage", "planned", "raw", "entry", "config"}


def kind_tests(source: str) -> list[int]:
    """Lines that compare the kind of a stage or test a stage for an attribute."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            if any(isinstance(s, ast.Attribute) and s.attr == "kind" for s in operands):
                lines.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            reads_attribute = node.func.id == "hasattr" or (
                node.func.id == "getattr" and len(node.args) == 3
            )
            if reads_attribute and _root(node.args[0]) in STAGE_NAMES:
                lines.append(node.lineno)
    return lines


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_stages_match_the_schema():
    assert list(STAGES) == list(StageEntry.model_fields)
    assert all(stage.kind == kind for kind, stage in STAGES.items())


def test_pipeline_modules_do_not_compare_stage_kinds():
    found = {p.name: kind_tests(p.read_text()) for p in PIPELINE.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_kind_tests_finds_planted_comparisons():
    planted = [
        'if planned.stage.kind == "train":\n    pass',
        'x = raw.kind in ("train", "draft")',
        'hasattr(stage, "formats")',
        'getattr(planned.stage.config, "qat", None)',
    ]
    assert [kind_tests(source) for source in planted] == 4 * [[1]]
