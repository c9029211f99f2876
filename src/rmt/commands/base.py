"""What the sub-commands share: a parser whose errors are one line with a suggestion, printing, and settings.

Settings come in layers, each overriding the one before: the defaults of the dataclasses, a preset, a configuration
file, flags such as `--model.key_dim 64`. A command calls `add_settings(parser, "model", "train")` in its `parser()` and
`resolve_settings(args, preset)` in its `run()`; neither imports torch.
"""

import argparse
import dataclasses
import json
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml
from jsonargparse import ArgumentParser as _ArgumentParser
from rich.console import Console

from rmt.config import ModelConfig, Settings, TrainConfig, preset, read_yaml, recipe
from rmt.errors import InputError, suggest

console = Console(highlight=False)


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.HelpFormatter):
    """Keeps the line breaks of descriptions, so that examples in `--help` can be copied."""


class ArgumentParser(_ArgumentParser):
    """jsonargparse's parser, failing with `InputError`: one line, and the nearest known name."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(exit_on_error=False, **settings)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is not None:  # the spelling of other tools that read configurations
            args = (["--print-config" if word == "--print_config" else word for word in args[0]], *args[1:])
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


SECTIONS: dict[str, type[Settings]] = {"model": ModelConfig, "train": TrainConfig}
#: What a configuration file may hold besides the sections. `data` is written to a run's config.yaml.
OTHER_KEYS = ("preset", "data")


class Resolved(NamedTuple):
    """The settings that hold after all layers."""

    model: ModelConfig
    train: TrainConfig


def add_settings(parser: ArgumentParser, *sections: str) -> None:
    """Add `--config`, `--print-config` and a flag for every key of the given sections (`model`, `train`)."""
    parser.add_argument("--config", metavar="FILE.yaml", help="settings from a file, or from a run's config.yaml")
    parser.add_argument("--print-config", action="store_true", help="print the settings that would hold, and stop")
    for section in sections:
        kind = SECTIONS[section]
        group = parser.add_argument_group(f"{section} settings", (kind.__doc__ or "").partition("\n")[0])
        for key, hint, default, text in describe_settings(kind):
            group.add_argument(
                f"--{section}.{key}",
                type=str,
                default=argparse.SUPPRESS,
                metavar=describe_hint(hint),
                help=f"{text} [{'unset' if default is None else default}]",
            )


def resolve_settings(args: Any, preset_name: str | None = None) -> Resolved:
    """The settings of a command line whose parser was made with `add_settings`: flags over file over preset."""
    file = read_settings_file(Path(args.config)) if args.config else {}
    name = preset_name or file.get("preset")
    layers = [{section: file.get(section) or {} for section in SECTIONS}]
    if name is not None:
        layers.insert(0, {"model": preset(name).to_dict(), "train": recipe(name).to_dict()})
    flags = args.as_dict()
    layers.append({section: flags.get(section) or {} for section in SECTIONS})
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for layer in layers:
        for section, kind in SECTIONS.items():
            lay_over(values[section], convert(kind, layer[section], section))
    resolved = Resolved(ModelConfig.from_dict(values["model"]), TrainConfig.from_dict(values["train"]))
    if args.print_config:
        print(yaml.safe_dump({name: part.to_dict() for name, part in resolved._asdict().items()}, sort_keys=False))
        sys.exit(0)
    return resolved


def read_settings_file(path: Path) -> dict[str, Any]:
    """A file with the sections `model` and `train`, or with the keys of a model alone (as `ModelConfig.to_yaml`)."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no settings: write `model:` and below it lines such as `key_dim: 64`.")
    known = {*SECTIONS, *OTHER_KEYS}
    model_keys = {item.name for item in dataclasses.fields(ModelConfig)}
    if not known & values.keys() and model_keys & values.keys():
        return {"model": values}
    for name in values:
        if name not in known:
            raise InputError(f"{path}: there is no section {name!r}. {suggest(str(name), known)}")
    for section in SECTIONS:
        if not isinstance(values.get(section) or {}, dict):
            raise InputError(f"{path}: section {section!r} must hold lines such as `name: value`.")
    return values


def lay_over(below: dict[str, Any], above: dict[str, Any]) -> None:
    """Override some settings. The length of a run is one setting with two names: a new one replaces the other."""
    for one, other in (("steps", "tokens"), ("tokens", "steps")):
        if above.get(one) is not None and above.get(other) is None and below.get(other) is not None:
            below[other] = None
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            lay_over(below[key], value)
        else:
            below[key] = value


def describe_settings(kind: type, prefix: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """Key, type, default and meaning of every setting of a dataclass; keys of a dataclass inside it have a dot."""
    texts = dict(re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)", kind.__doc__ or "", re.MULTILINE))
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from describe_settings(hint, f"{item.name}.")
        else:
            yield prefix + item.name, hint, item.default, " ".join(texts.get(item.name, "").split())


def describe_hint(hint: Any) -> str:
    options = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return "{" + ",".join(options) + "}"
    return "|".join(describe_hint(option) for option in options if option is not type(None)) or hint.__name__.upper()


def convert(kind: type[Settings], values: dict[str, Any], where: str) -> dict[str, Any]:
    """Values from a file or a command line in the types of the settings, so that 64, "64" and 6.4e1 are the same."""
    hints = typing.get_type_hints(kind)
    converted = {}
    for key, value in values.items():
        if key not in hints:
            raise InputError(f"unknown key {where}.{key}. {suggest(str(key), hints)}")
        hint, name = hints[key], f"{where}.{key}"
        if dataclasses.is_dataclass(hint) and isinstance(value, dict):
            converted[key] = convert(hint, value, name)  # type: ignore[arg-type]
        else:
            converted[key] = convert_value(hint, value, name)
    return converted


def convert_value(hint: Any, value: Any, name: str) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) is not typing.Literal else ()
    if type(None) in options and (value is None or str(value).lower() in ("none", "null", "")):
        return None
    kinds = {option for option in options if option is not type(None)} or {hint}
    text = str(value).strip()
    if bool in kinds:
        if text.lower() not in ("true", "false"):
            raise InputError(f"{name} must be true or false, got {text!r}.")
        return text.lower() == "true"
    if kinds & {int, float}:
        try:
            number = float(text)
            whole = int(text) if re.fullmatch(r"[+-]?\d+", text) else int(number) if number == int(number) else None
        except (ValueError, OverflowError):
            number, whole = float("nan"), None
        if float in kinds and (number == number or text.lower() == "nan"):
            return number
        if int in kinds and whole is not None:
            return whole
        raise InputError(f"{name} must be a {'' if float in kinds else 'whole '}number, got {text!r}.")
    return text
