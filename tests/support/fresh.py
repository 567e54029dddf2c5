"""Programs in a process of their own: what forks, ends the interpreter or sets threads."""

import os
import subprocess
import sys


def output_of(program: str, *args: object, **environment: str | None) -> str:
    """Run a program with this Python, and return what it prints; it may import test helpers.

    Parameters
    ----------
    program
        Code, or the path of a script.
    **environment
        Variables that are set, or removed by None.
    """
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    kept = {name: value for name, value in given.items() if value is not None}
    start = [program] if program.endswith(".py") else ["-c", program]
    done = subprocess.run(
        [sys.executable, *start, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=kept,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-3000:]}"
    return done.stdout
