"""Some tests of commands use the models of the tests of `convert`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "convert"))
