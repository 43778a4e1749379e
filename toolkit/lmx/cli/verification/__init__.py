"""`lmx doctor --verify`: is what lmx computes on this machine right, and how fast?

Checks compare own kernels with plain operations, and batches, drafts and resumed runs
with simple ones, on a tiny random model. Then the speed of lmx and of mlx_lm is
measured on a model that fills the device.
"""

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...errors import FAILED, UserError
from ...run import terminal

CHECK_ROW = "{:<44}{:>10}{:>10}  {}\n"
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
            row = {"name": name, "lmx": _best(own, lab), "mlx_lm": _best(other, lab)}
            report["speed"].append(row)
            cells = f"{row['lmx']:,.0f}", f"{row['mlx_lm']:,.0f}"
            ratio = f"{row['lmx'] / row['mlx_lm']:.2f}"
            write(SPEED_ROW.format(name, *cells, ratio))
    report["seconds"] = round(time.perf_counter() - started)
    failed = [row["name"] for row in report["checks"] if not row["passed"]]
    if failed:
        write(f"\n{len(failed)} of {len(CHECKS)} checks failed: {', '.join(failed)}\n")
    write("\nFor a report:\n")
    terminal.write_out(json.dumps(report) + "\n")
    return FAILED if failed else 0


def run_check(name: str, check: Callable[[Any], tuple[float, float]], lab: Any) -> dict:
    """Run a check, from a `Lab` to an error and its tolerance."""
    reason = None
    try:
        error, tolerance = check(lab)
    except (RuntimeError, ValueError, UserError) as fault:
        # MLX raises the first two, for example where a kernel does not compile.
        error, tolerance, reason = math.inf, 0.0, str(fault).splitlines()[0]
    passed = error <= tolerance  # NaN is not
    row = {"name": name, "tolerance": tolerance, "passed": passed, "reason": reason}
    # JSON has no infinity.
    return row | {"error": error if math.isfinite(error) else 1e308}


def _best(measure: Callable[[Any], Iterable[float]], lab: Any) -> float:
    """The best rate: other programs only make a run slower."""
    return max(measure(lab))
