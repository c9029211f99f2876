"""`rmt bench`: speed and memory side by side, as ratios measured in one run."""

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from rmt.commands.base import ArgumentParser, Formatter, console, print_json
from rmt.errors import InputError, suggest

DESCRIPTION = """\
Measure an RMT against a transformer of torch modules, against our own transformer and, for decoding, against
transformers' GPT-2, in interleaved rounds of one run. All versions are first compared on a small input; where one is
wrong nothing is timed. docs/performance.md explains the figures. A machine that does nothing else gives the best ones.

examples:
  rmt bench                                              everything, GPT-2 small dimensions (about 20 minutes)
  rmt bench --what stack,step --layers 3 --rounds 5      a quick look
  rmt bench --shape medium --what step --rows stock,native
  rmt bench --json result.json                           also keep the result; `--json -` prints it
  rmt bench --from result.json --figure step.png         show and draw a kept result
"""


def parser() -> ArgumentParser:
    parser = ArgumentParser(prog="rmt bench", description=DESCRIPTION, formatter_class=Formatter)
    parser.add_argument("--shape", type=str, default="small", help="tiny, S, small or medium")
    parser.add_argument(
        "--what", type=str, default=None, metavar="PARTS", help="some of stack,step,decode,memory,loss,keydim [all]"
    )
    parser.add_argument(
        "--rows", type=str, default=None, help="some of stock,vector,plain,portable,native,gpt2 [all that can run]"
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shape has: quicker, not judged")
    parser.add_argument("--threads", type=int, default=None, help="of PyTorch and of our kernels [PyTorch's choice]")
    parser.add_argument(
        "--clock", type=str, default="wall", help="wall, or cpu: the process's CPU time, with one thread"
    )
    parser.add_argument(
        "--json", nargs="?", const="-", default=None, metavar="FILE", help="write the result; - prints it instead"
    )
    parser.add_argument("--figure", type=str, default=None, metavar="FILE.png", help="draw where a step's time goes")
    parser.add_argument("--from", dest="source", type=str, default=None, metavar="FILE", help="show a kept result")
    return parser


def run(args: Any) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # read when torch is loaded: its profiler is talkative
    from rmt.bench.picture import draw, read_result
    from rmt.bench.table import show

    target = check_writable(args.json)
    result = read_result(Path(args.source)) if args.source else measure(args)
    if target is not None:  # first of all: it took long to measure
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.json == "-":
        print_json(result)
    else:
        show(result, console)
    if target is not None:
        console.print(f"wrote {target}", markup=False, soft_wrap=True)
    for path in draw(result, Path(args.figure)) if args.figure else []:
        Console(stderr=True).print(f"wrote {path}", markup=False, soft_wrap=True, highlight=False)
    return 0


def measure(args: Any) -> dict[str, Any]:
    from rmt.bench.cases import PARTS, find_case

    parts = words(args.what) or PARTS
    for part in parts:
        if part not in PARTS:
            raise InputError(f"bench: there is nothing called {part!r} to measure. {suggest(part, PARTS)}")
    for name in ("rounds", "layers", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InputError(f"bench: --{name} {value}: must be at least 1.")
    if args.clock not in ("wall", "cpu"):
        raise InputError(f"bench: --clock {args.clock}: choose wall or cpu.")
    if args.clock == "cpu" and args.threads != 1:
        raise InputError("bench: --clock cpu adds up the time of all threads: use it with --threads 1.")

    import torch

    from rmt.bench import suite

    if args.threads:
        torch.set_num_threads(args.threads)
    case = find_case(args.shape, args.layers, words(args.rows))
    with Console(stderr=True).status("starting") as status:
        return suite.run(case, parts, args.rounds, args.clock, say=status.update)


def words(text: str | None) -> tuple[str, ...] | None:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else None


def check_writable(name: str | None) -> Path | None:
    """The file for the result, refused before the long work rather than after it."""
    if name in (None, "-"):
        return None
    path = Path(str(name))
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"bench: cannot write {path}: name a file in a folder that exists.")
    return path
