"""What the sub-commands share: a parser whose errors are one line with a suggestion, and printing."""

import argparse
import dataclasses
import json
import re
from typing import Any, NoReturn

from jsonargparse import ArgumentParser as _ArgumentParser
from rich.console import Console

from rmt.errors import InputError, suggest

console = Console(highlight=False)


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.HelpFormatter):
    """Keeps the line breaks of descriptions, so that examples in `--help` can be copied."""


class ArgumentParser(_ArgumentParser):
    """jsonargparse's parser, failing with `InputError`: one line, and the nearest known name."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(exit_on_error=False, **settings)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().parse_args(*args, **kwargs)
        except (argparse.ArgumentError, TypeError, KeyError) as error:
            self.error(str(error))

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise InputError(f"{self.prog.removeprefix('rmt ')}: {self.explain(' '.join(message.split()))}")

    def explain(self, message: str) -> str:
        """Rephrase what jsonargparse says where a person would not understand it."""
        known = {option for action in self._actions for option in action.option_strings}
        if found := re.search(r"unrecognized arguments: (--[^\s=]+)", message):
            return f"unknown option {found[1]}. {suggest_option(found[1], known)}"
        if found := re.search(r"Group '([^']+)' does not accept option '([^']+)'", message):
            keys = {name.removeprefix(f"--{found[1]}.") for name in known if name.startswith(f"--{found[1]}.")}
            return f"unknown key {found[1]}.{found[2]}. {suggest(found[2], keys)}"
        if found := re.search(r"Parser key \"([^\"]+)\": Expected an? (.+?)\. Got value: (.*)", message):
            kind = re.sub(r"<class '(\w+)'>", r"\1", found[2])
            return f"{found[1]} must be {kind}, got {found[3]!r}."
        return message


def suggest_option(name: str, known: set[str]) -> str:
    answer = suggest(name, known)
    return answer if answer.startswith("Did") else "`--help` lists the options."


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=plain))


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")
