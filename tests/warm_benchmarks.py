"""A benchmark program in the fork server, with the processes that it starts.

A benchmark runs everything that it measures in a process of its own. With a few
examples, imports would take most of the time.
"""

import os
import runpy
import sys
from pathlib import Path

import warm

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PROGRAM = "import sys, warm_benchmarks; warm_benchmarks.main(*sys.argv[1:])"


def run(path: Path, *arguments: str, **settings):
    """Run a benchmark program to its end; `settings` are those of `warm.run`."""
    address = warm.address_of(0)
    names = (address, str(path), *arguments)
    return warm.run(PROGRAM, *names, timeout=500, **settings)


def main(address: str, path: str, *arguments: str) -> None:
    """In a fork: run the program, whose processes are forks of the same server."""
    warm.address_of = lambda server: address
    sys.path[:0] = [str(BENCHMARKS), str(Path(path).parent)]
    # In place of another process.
    import programs

    real = programs.call

    def call(command, threads=None, *, python=sys.executable, stock=False) -> str:
        command = [*map(str, command)]
        if stock or python != sys.executable or command[0] == "-m":
            return real(command, threads, python=python, stock=stock)
        threads = {"LMX_BLAS_THREADS": str(threads)} if threads else {}
        if command[0] == "-c":
            _, program, *rest = command
            done = warm.run(program, *rest, env=os.environ | threads, timeout=500)
        else:
            done = run(*command, env=os.environ | threads)
        if done.returncode:
            sys.exit(f"{command} failed:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    programs.call = call
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
