"""`rmt tune`: muTransfer. A random search on a small base model, and two checks that its result carries over."""

import sys
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from rmt.commands.base import (
    ArgumentParser,
    Formatter,
    Resolved,
    add_settings,
    console,
    convert,
    lay_over,
    print_json,
    read_settings_file,
    resolve_settings,
)
from rmt.config import ModelConfig, TrainConfig
from rmt.errors import InputError, suggest

DESCRIPTION = """Search learning rate, multipliers and initial spread on a small base model; use them on larger ones.

  rmt tune --stream matrix --data tokens --out tuned               # 100 trials of the paper's base model
  rmt tune --stream matrix --data tokens --out tuned --trials 60 --train.steps 250 --train.batch_size 16 \\
      --model.context 64 --model.layers 2 --model.heads 4 --model.head_dim 16 --model.key_dim 16 --model.ff_dim 256
  rmt train --config tuned/best.yaml --data tokens --out runs/wide \\
      --model.heads 16 --model.key_dim 64 --model.ff_dim 1024     # four times as wide: muTransfer scales the rest
  rmt tune transfer --help                                         # does the best learning rate stay when width grows?
  rmt tune coord-check --help                                      # do activations keep their size when width grows?

Log-uniform draws: lr from 1e-4 to 1e-1; alpha_in, alpha_attn, alpha_out and sigma from 0.1 to 10. What is drawn
depends on --seed only. The same command again goes on after an interruption, and beside itself shares the work; with a
larger --trials it adds trials. Settings that are not given are those of the paper's base model; the vocabulary is the
data's. Written to --out: best.yaml, trials.json, slices.png, importance.png, study.db (Optuna), trials/."""

TRANSFER = """Train at several widths and learning rates: under muP the best learning rate stays where it is.

  rmt tune transfer --config tuned/best.yaml --widths 1,2 --lr 5e-3,1e-2,2e-2,4e-2 --data tokens --out transfer
  rmt tune transfer --config rmt/best.yaml,transformer/best.yaml --widths 1,2 --lr 1e-2,2e-2 --data tokens --out both

A width of 2 has twice the heads, key dimension and feed-forward neurons, at the same head dimension. --standard trains
all of it a second time without muP, for contrast. Writes transfer.json and transfer.png beside the runs. Interrupted,
it goes on where it stopped."""

COORD_CHECK = """Take a few steps at several widths, with muP and without: under muP activations keep their size.

  rmt tune coord-check --out check                                 # both streams, 1, 2, 4 and 8 times as wide
  rmt tune coord-check --streams matrix --widths 1,2,4 --steps 8 --train.lr 2e-2 --out check

Prints the slope of log size against log width, 0 where the width does not matter, of the sizes at the start, of those
after the steps and of the change between. Writes coordinates.json and coordinates.png. Tokens are random."""


class TuneParser(ArgumentParser):
    """The search's options, unless the first word names one of the checks."""

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        words = args[0] if args and args[0] is not None else sys.argv[1:]
        name = words[0] if words and not words[0].startswith("-") else None
        if name is not None and name not in CHECKS:
            raise InputError(f"tune: there is no {name!r}. {suggest(name, CHECKS)}")
        found = super().parse_args(words, **kwargs) if name is None else CHECKS[name]().parse_args(words[1:])
        found.action = name or "search"
        return found


def parser() -> ArgumentParser:
    usage = "rmt tune --stream NAME --data DIR --out DIR [--section.key VALUE ...]"
    result = TuneParser(prog="rmt tune", usage=usage, description=DESCRIPTION, formatter_class=Formatter)
    result.add_argument("--stream", help="the residual stream to tune: matrix, vector, ... (default: model.stream)")
    result.add_argument("--data", metavar="DIR", help="token dataset made by `rmt data prepare`")
    result.add_argument("--out", metavar="DIR", help="folder of the search")
    result.add_argument("--trials", type=int, default=100, help="how many in the end (default: 100)")
    result.add_argument("--workers", type=int, help="trials at a time (default: one per core)")
    result.add_argument("--space", metavar="NAME=LOW:HIGH,...", help="other intervals; NAME=VALUE fixes a parameter")
    result.add_argument("--pruner", default="none", help="none, or median: give up trials that lag (default: none)")
    result.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    result.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    result.add_argument("--quiet", action="store_true", help="show no progress")
    result.add_argument("--json", action="store_true", help="print the result as JSON")
    add_settings(result, "model", "train")
    return result


def transfer_parser() -> ArgumentParser:
    usage = "rmt tune transfer --config FILE.yaml[,FILE.yaml] --lr A,B,... --data DIR --out DIR"
    result = ArgumentParser(prog="rmt tune transfer", usage=usage, description=TRANSFER, formatter_class=Formatter)
    result.add_argument("--widths", default="1,2", help="factors of the base model (default: 1,2)")
    result.add_argument("--lr", help="learning rates, with commas")
    result.add_argument("--data", metavar="DIR", help="token dataset made by `rmt data prepare`")
    result.add_argument("--out", metavar="DIR", help="folder for the runs and the figure")
    result.add_argument("--seeds", type=int, default=1, help="runs per point (default: 1)")
    result.add_argument("--standard", action="store_true", help="also without muP")
    result.add_argument("--workers", type=int, help="runs at a time (default: one per core)")
    result.add_argument("--quiet", action="store_true", help="show no progress")
    result.add_argument("--json", action="store_true", help="print the result as JSON")
    add_settings(result, "model", "train")
    return result


def coord_check_parser() -> ArgumentParser:
    usage = "rmt tune coord-check --out DIR [--streams NAME,...] [--section.key VALUE ...]"
    result = ArgumentParser(
        prog="rmt tune coord-check", usage=usage, description=COORD_CHECK, formatter_class=Formatter
    )
    result.add_argument("--streams", default="matrix,vector", help="with commas (default: matrix,vector)")
    result.add_argument("--widths", default="1,2,4,8", help="factors of the base model (default: 1,2,4,8)")
    result.add_argument("--steps", type=int, default=4, help="optimizer steps (default: 4)")
    result.add_argument("--seeds", type=int, default=3, help="models that are averaged (default: 3)")
    result.add_argument("--out", metavar="DIR", help="folder for the figure and the numbers")
    result.add_argument("--json", action="store_true", help="print the result as JSON")
    add_settings(result, "model", "train")
    return result


CHECKS = {"transfer": transfer_parser, "coord-check": coord_check_parser}


def run(args: Any) -> int | None:
    return {"search": run_search, "transfer": run_transfer, "coord-check": run_coord_check}[args.action](args)


def require(args: Any, *names: str) -> None:
    for name in names:
        if getattr(args, name) is None:
            raise InputError(f"{command_of(args)}: give --{name} {'DIR' if name in ('data', 'out') else '...'}.")


def command_of(args: Any) -> str:
    return "tune" if args.action == "search" else f"tune {args.action}"


def run_search(args: Any) -> int | None:
    require(args, "data", "out")
    from rmt.data import TokenDataset
    from rmt.experiments.tune import BASE_MODEL, BASE_TRAIN, Search, parse_space, search, write_results

    base = BASE_MODEL.replace(vocab_size=TokenDataset.open(args.data).vocab_size)
    settings = settings_over(args, base, BASE_TRAIN)
    wanted = Search(
        model=settings.model if args.stream is None else settings.model.replace(stream=args.stream),
        train=settings.train,
        data=Path(args.data),
        out=Path(args.out),
        trials=args.trials,
        seed=args.seed,
        space=parse_space(args.space.split(",") if args.space else []),
        pruner=args.pruner,
        device=args.device,
    )
    stopped = search(wanted, console, workers=args.workers, quiet=args.quiet or args.json)
    if stopped is not None:
        print(f"rmt: interrupted; the same command goes on with the search in {args.out}.", file=sys.stderr)
        return 128 + stopped
    result = write_results(wanted)
    print_json(result) if args.json else print_search(result)
    return None


def settings_over(args: Any, model: ModelConfig, train: TrainConfig) -> Resolved:
    """The settings of a command line over these: flags over file over base."""
    below = Resolved(model, train)._asdict()
    values = {section: part.to_dict() for section, part in below.items()}
    for layer in (read_settings_file(Path(args.config)) if args.config else {}, args.as_dict()):
        for section, part in below.items():
            lay_over(values[section], convert(type(part), layer.get(section) or {}, section))
    if args.print_config:
        print(yaml.safe_dump(values, sort_keys=False))
        sys.exit(0)
    return Resolved(ModelConfig.from_dict(values["model"]), TrainConfig.from_dict(values["train"]))


def print_search(result: dict[str, Any]) -> None:
    from rmt.experiments.tune import ranked

    trials, names = result["trials"], list(result["asked"]["space"])
    table = new_table("trial", "dev loss", *names)
    for row in ranked(trials)[:5]:
        table.add_row(str(row["number"]), f"{row['loss']:.4f}", *(f"{row[name]:.3g}" for name in names))
    console.print(table)
    for state in ("diverged", "pruned"):
        if count := sum(row["state"] == state for row in trials):
            console.print(f"{state}: {count} of {len(trials)} trials")
    shares = ", ".join(f"{name} {share:.2f}" for name, share in result["importances"].items())
    console.print(f"importance ({result['importance_method']}): {shares}", soft_wrap=True)
    print_files(result["files"])


def run_transfer(args: Any) -> None:
    require(args, "config", "lr", "data", "out")
    from rmt.commands.compare import learning_rates
    from rmt.experiments.transfer import Transfer, transfer
    from rmt.report.tuning import transfer_figure

    files, settings = args.config.split(","), []
    for args.config in files:
        settings.append(resolve_settings(args))
    wanted = Transfer(
        models=[one.model for one in settings],
        train=[one.train for one in settings],
        data=Path(args.data),
        out=Path(args.out),
        widths=whole_numbers("widths", args.widths),
        learning_rates=sorted(learning_rates(args.lr)),
        seeds=args.seeds,
        standard=args.standard,
    )
    summary = transfer(wanted, console, workers=args.workers, quiet=args.quiet or args.json)
    files = [wanted.out / "transfer.json", *transfer_figure(summary["curves"], wanted.out / "transfer")]
    if args.json:
        return print_json({**summary, "files": [str(path) for path in files]})
    table = new_table("stream", "init", "width", *summary["curves"][0]["losses"], "best lr")
    for curve in summary["curves"]:
        losses = [f"{sum(found) / len(found):.4f}" for found in curve["losses"].values()]
        table.add_row(curve["stream"], curve["init"], str(curve["width"]), *losses, f"{curve['best_lr']:g}")
    console.print(table)
    return print_files(files)


def run_coord_check(args: Any) -> None:
    require(args, "out")
    from rmt.experiments.coord_check import BASE_MODEL, BASE_TRAIN, Check, coord_check, write_check

    settings = settings_over(args, BASE_MODEL, BASE_TRAIN)
    check = Check(
        streams=args.streams.split(","),
        model=settings.model,
        train=settings.train,
        widths=whole_numbers("widths", args.widths),
        steps=args.steps,
        seeds=args.seeds,
    )
    rows = coord_check(check)
    files = write_check(check, rows, Path(args.out))
    if args.json:
        return print_json({"rows": rows, "files": [str(path) for path in files]})
    moments = ("start", "end", "change")
    table = new_table("stream", "quantity", "muP: start", "end", "change", "not muP: start", "end", "change")
    table.columns[1].justify, table.columns[1].no_wrap = "left", True
    for row in rows:
        if row["init"] == "mup":
            slopes = [row, next(one for one in rows if same_quantity(one, row) and one["init"] == "lecun")]
            cells = [one[f"{moment}_slope"] for one in slopes for moment in moments]
            table.add_row(row["stream"], row["quantity"], *("zero" if c is None else f"{c:+.2f}" for c in cells))
    console.print("Slopes of log size against log width:")
    console.print(table)
    return print_files(files)


def same_quantity(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("stream", "quantity"))


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--{name} {text}: write whole numbers with commas, for example 1,2,4.") from None


def new_table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def print_files(files: Any) -> None:
    for path in files:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
