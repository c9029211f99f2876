"""`rmt export`: a run as a folder that transformers reads."""

from pathlib import Path
from typing import Any

from rmt.commands.base import ArgumentParser, Formatter, console, print_json

DESCRIPTION = """\
Write the model of a run as a folder for transformers: safetensors, configuration, tokenizer, model card.

  rmt export runs/first exported/first
  rmt export runs/first exported/small --dtype bfloat16 --checkpoint latest

  >>> import rmt
  >>> from transformers import AutoModelForCausalLM, AutoTokenizer
  >>> model = AutoModelForCausalLM.from_pretrained("exported/first")

`--with-code` adds the modelling code for people who do not have this package (`trust_remote_code=True`)."""


def parser() -> ArgumentParser:
    result = ArgumentParser(prog="rmt export", description=DESCRIPTION, formatter_class=Formatter)
    result.add_argument("run", metavar="RUN", help="run directory")
    result.add_argument("out", metavar="DIR", help="folder to write")
    result.add_argument("--dtype", type=str, help="float32, bfloat16 or float16 (default: as trained)")
    result.add_argument("--checkpoint", type=str, default="best", help="best, latest or a step [best]")
    result.add_argument("--tokenizer", type=str, metavar="gpt2|DIR", help="if the run's dataset is not there any more")
    result.add_argument("--with-code", action="store_true", help="add the modelling code")
    result.add_argument("--shard-size", type=str, default="5GB", help="largest weight file [5GB]")
    result.add_argument("--json", action="store_true", help="print what was written as JSON")
    return result


def run(args: Any) -> None:
    from rmt.hub.export import check_is_free, export
    from rmt.hub.folder import load_model
    from rmt.hub.quiet import quiet_transformers

    check_is_free(Path(args.out).expanduser())
    loaded = load_model(args.run, checkpoint=args.checkpoint, tokenizer=args.tokenizer)
    with quiet_transformers():
        out = export(loaded, args.out, dtype=args.dtype, with_code=args.with_code, shard_size=args.shard_size)
    files = sorted(path.name for path in out.iterdir())
    if args.json:
        print_json({"path": str(out), "step": loaded.record.get("step"), "files": files})
        return
    console.print(f"wrote {out}: {', '.join(files)}", markup=False, soft_wrap=True)
