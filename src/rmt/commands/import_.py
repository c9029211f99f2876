"""`rmt import`: a transformers folder, or the authors' parameters, as a run."""

from pathlib import Path
from typing import Any

from rmt.commands.base import ArgumentParser, Formatter, console, print_json
from rmt.errors import InputError

DESCRIPTION = """\
Make a run directory of an exported folder, fine-tuned elsewhere or not, or of the authors' parameters.

  rmt import exported/first --out runs/back
  rmt import --from-authors params.npz --tokenizer gpt2 --out runs/authors

The npz has one array per parameter under the authors' names, and `meta`: a JSON text with kind (rmt or transformer)
and config. The run can be sampled, evaluated, exported and trained on; the optimizer starts anew."""


def parser() -> ArgumentParser:
    result = ArgumentParser(prog="rmt import", description=DESCRIPTION, formatter_class=Formatter)
    result.add_argument("folder", metavar="DIR", nargs="?", help="folder written by `rmt export` or save_pretrained")
    result.add_argument("--from-authors", type=str, metavar="FILE.npz", help="the authors' parameter tree")
    result.add_argument("--out", type=str, metavar="RUN", help="run directory to write [runs/NAME]")
    result.add_argument("--tokenizer", type=str, metavar="gpt2|DIR", help="tokenizer to put into the run")
    result.add_argument("--json", action="store_true", help="print what was written as JSON")
    return result


def run(args: Any) -> None:
    if (args.folder is None) == (args.from_authors is None):
        raise InputError("import: give one of them: a folder, or --from-authors FILE.npz.")
    source = Path(args.folder or args.from_authors).expanduser()
    out = Path(args.out or Path("runs") / source.resolve().stem)
    from rmt.hub.importing import import_authors, import_folder

    make = import_authors if args.folder is None else import_folder
    make(source, out, args.tokenizer)
    if args.json:
        print_json({"path": str(out)})
        return
    console.print(f"wrote {out}. Try: rmt generate {out} --prompt 'Once upon a time'", markup=False, soft_wrap=True)
