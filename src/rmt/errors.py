"""The exception for bad input, the one for runs that fail, and the near-miss suggestion that its messages carry.

Everything a person can get wrong (a misspelt preset, a missing file, a damaged checkpoint) raises `InputError` with
one line: what is wrong and what to do. The command line prints that line and exits with status 2; a Python user
sees an ordinary `ValueError`.
"""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input. The message is one line: what is wrong, and what to do about it."""


class RunFailed(RuntimeError):
    """A run that cannot go on although its input was right. One line; the command exits with status 1."""


def suggest(name: str, options: Iterable[str]) -> str:
    """A sentence that helps somebody who misspelt `name`: the nearest option, or all of them."""
    names = sorted(options)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.55)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Choose one of: {', '.join(names)}."
