"""`lmx doctor --verify`: is what lmx computes on this machine right, and how fast?

Checks compare own kernels with plain operations, and batches, drafts and resumed runs
with simple ones, on a tiny random model. Then the speed of lmx and of mlx_lm is
measured on a model that fills the device.
"""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...errors import FAILED, UserError
from ...run import terminal

CHECK_ROW = "{:<44}{:>10}{:>10}  {}\n"
# MLX raises the first two, as where a kernel does not compile; the others come from
# another version of mlx_lm.
FAULTS = (RuntimeError, ValueError, UserError)
FAULTS += (TypeError, AttributeError, ImportError, LookupError)
SPEED_ROW = "{:<44}{:>12}{:>12}{:>8}\n"


def verify(facts: dict[str, str], *, quick: bool, as_json: bool) -> int:
    """Check and measure; returns the exit code: 1 if a check fails.

    Args:
        facts: of the machine, for the report.
        quick: seconds on a CPU: smaller models, one run of each.
        as_json: print the report alone.
    """
    from .checks import CHECKS, Lab
    from .speed import SPEEDS

    write = (lambda text: None) if as_json else terminal.write_out
    started, report = time.perf_counter(), {"facts": facts, "checks": [], "speed": []}
    with TemporaryDirectory() as folder:
        lab = Lab(Path(folder), quick=quick)
        write(CHECK_ROW.format("\ncheck", "error", "tolerance", "verdict"))
        for name, check in CHECKS.items():
            row = run_check(name, check, lab)
            report["checks"].append(row)
            verdict = "ok" if row["passed"] else f"WRONG {row['reason'] or ''}".strip()
            figures = (f"{row[key]:.1e}" for key in ("error", "tolerance"))
            write(CHECK_ROW.format(name, *figures, verdict))
        write(SPEED_ROW.format("\ntokens per second", "lmx", "mlx_lm", "ratio"))
        for name, (own, other) in SPEEDS.items():
            row = measured(name, own, other, lab)
            report["speed"].append(row)
            write(SPEED_ROW.format(name, *_cells(row)))
    report["seconds"] = round(time.perf_counter() - started)
    failed = [row["name"] for row in report["checks"] if not row["passed"]]
    failed += [row["name"] for row in report["speed"] if row["lmx"] is None]
    if failed:
        write(f"\nfailed: {', '.join(failed)}\n")
    write("\nFor a report:\n")
    terminal.write_out(json.dumps(report) + "\n")
    return FAILED if failed else 0


def run_check(name: str, check: Callable[[Any], tuple[float, float]], lab: Any) -> dict:
    """Run a check, from a `Lab` to an error and its tolerance."""
    reason = None
    try:
        error, tolerance = check(lab)
    except FAULTS as fault:
        error, tolerance, reason = math.inf, 0.0, _first_line(fault)
    passed = error <= tolerance  # NaN is not
    row = {"name": name, "tolerance": tolerance, "passed": passed, "reason": reason}
    # JSON has no infinity.
    return row | {"error": error if math.isfinite(error) else 1e308}


def measured(name: str, own: Callable, other: Callable, lab: Any) -> dict:
    """The best rates of lmx and of mlx_lm: other programs only make a run slower. None
    for one that fails."""
    row = {"name": name, "reason": None}
    for tool, measure in (("lmx", own), ("mlx_lm", other)):
        try:
            row[tool] = max(measure(lab))
        except FAULTS as fault:
            row |= {tool: None, "reason": f"{tool}: {_first_line(fault)}"}
    return row


def _cells(row: dict) -> list[str]:
    rates = row["lmx"], row["mlx_lm"]
    cells = ["failed" if rate is None else f"{rate:,.0f}" for rate in rates]
    return [*cells, "" if None in rates else f"{rates[0] / rates[1]:.2f}"]


def _first_line(fault: Exception) -> str:
    return str(fault).partition("\n")[0]
