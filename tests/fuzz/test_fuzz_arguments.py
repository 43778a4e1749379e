"""Strange arguments of the public functions: each is taken, or refused by name."""

import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import lmx
import numpy as np
from forked_cases import run_cases
from json_mutations import strange_value

WORDS = ["a", "lmx", "max_tokens", "x.yaml", "seed=1", "stages.train.steps=2", "a\0b"]
RECIPE = {"model": "a/b", "data": {"train": "builtin:stdlib"}}
RECIPE |= {"stages": [{"train": {"steps": 1, "batch_size": 1}}, {"export": {}}]}


class Unprintable:
    """An object that fails wherever Python asks it for something."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None


class Late(lmx.Callback):
    def on_end(self, state):
        """Never called."""


class Hook(lmx.Callback):
    def on_step(self, state):
        """Called."""


def strange(rng: random.Random):
    """Values that JSON does not have, too."""
    others = [b"x", {1}, object(), Unprintable(), int, len, iter([1]), np.int64(3)]
    others += [np.array([1.5]), Path("a"), lmx, lmx.Recipe, Hook, Hook(), Late()]
    others += [[Hook()], [Late()], {"a": len}, {1: 1}, ("a", 1), [("a", 1)], 1j, ...]
    others += [10**400, -(10**400), "\ud800", {"\ud800": 1}, {"seed": object()}, print]
    return rng.choice([strange_value(rng), rng.choice(others), rng.choice(WORDS)])


# Arguments that are right, by function: one or two of them are replaced.
SOUND = {
    "train": {"recipe": RECIPE, "overrides": {"seed": 1}, "output": "o"}
    | {"callbacks": [Hook()], "metrics": {}, "loss": None, "restart": False}
    | {"ignore_limits": True, "allow_python": False, "quiet": True},
    "check": {"recipe": RECIPE, "overrides": ["seed=1"], "find": None},
    "Recipe": {"overrides": {}, "model": "a/b", "seed": 1, "stages": RECIPE["stages"]},
    "quantize": {"model": "a/b", "data": None, "output": None, "seed": 0, "bits": 4}
    | {"restart": False, "ignore_limits": False, "quiet": True},
    "make_draft": {"model": "a/b", "data": "builtin:stdlib", "seed": 0, "steps": 2},
    "export": {"model": "a/b", "formats": ["mlx"], "output": "o", "license": None},
    "evaluate": {"model": "a/b", "data": "builtin:stdlib", "metrics": {}, "seed": 0}
    | {"reference": None, "quiet": True, "num_tokens": 8},
    "load": {"source": "a/b", "adapter": None, "draft": None, "revision": None}
    | {"trust_remote_code": False, "compute": "auto"},
    "generate": {"model": "a/b", "prompt": "x", "stream": False, "max_tokens": 2}
    | {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "stop": ["x"]}
    | {"system": None, "draft": None, "num_draft_tokens": None, "kv_bits": None},
    "open_run": {"path": "o"},
}


def without_work() -> None:
    """Arguments are the subject: nothing is trained, loaded or measured."""
    from lmx.api import checking, evaluation, generation, jobs, model

    def nothing(*_, **__):
        raise lmx.UserError("nothing is done here", hint="this is a test")

    jobs.runner.run = nothing
    checking.DryRun = evaluation.Evaluator = nothing
    model.load_model = evaluation.make_context = generation.load = nothing


def run_case(seed: str) -> str:
    """Call a function with one or two strange arguments."""
    rng = random.Random(seed)
    without_work()
    name = rng.choice(sorted(SOUND))
    arguments = dict(SOUND[name])
    for _ in range(0 if seed.startswith("sound") else rng.choice([1, 1, 2])):
        arguments[rng.choice([*arguments, "x", "stages"])] = strange(rng)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            getattr(lmx, name)(**arguments)
        except lmx.UserError as error:
            return "done" if "nothing is done" in str(error) else "refused"
        except TypeError as error:
            # Python's own message, of a name that is no parameter of a class.
            if name == "Recipe" and "keyword argument" in str(error):
                return "refused"
            error.add_note(f"{name}: {arguments.keys()}")
            raise
        except BaseException as error:
            error.add_note(f"{name}: {[*arguments]}")
            raise
        finally:
            os.chdir("/")
    return "done"


def test_strange_arguments_are_refused_by_name(num_cases, request):
    seed = request.config.getoption("--fuzz-seed")
    seeds = [f"{seed} {number}" for number in range(num_cases(400))]
    outcomes = run_cases("test_fuzz_arguments", seeds)
    assert outcomes["refused"] > len(seeds) // 2, outcomes
    seeds = [f"sound {number}" for number in range(20)]
    assert run_cases("test_fuzz_arguments", seeds)["done"] > 14
