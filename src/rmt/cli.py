"""The `rmt` command: finds the sub-command, hands it the arguments, and turns failures into one line and a status.

Each sub-command lives in its own file in `rmt.commands` and is imported only when it is called, so that `rmt --help`
answers at once. A command file has `parser()`, which returns its `ArgumentParser`, and `run(args)`.
"""

import importlib
import os
import sys
from collections.abc import Sequence

from rmt.errors import InputError, RunFailed, suggest

COMMANDS = {
    "demo": "train a small RMT and its mirrored transformer, about five minutes, and see what comes out",
    "data": "text -> checksummed token shards (prepare, verify, show)",
    "train": "train a model on a token dataset; resumable",
    "checkpoints": "list and verify the checkpoints of a run",
    "compare": "residual streams side by side: equal data, several seeds",
    "sweep": "the paper's experiments, at its scale or at one that a CPU can run",
    "tune": "muTransfer: search hyperparameters on a small model, for larger ones",
    "report": "figures and one self-contained HTML page from runs",
    "eval": "perplexity and downstream tasks, several models side by side",
    "generate": "continue prompts with a trained or exported model",
    "export": "a run as a folder for transformers: safetensors, tokenizer, model card",
    "import": "an exported folder, or the authors' parameters, as a run",
    "wiring": "what each layer reads of what each layer wrote: the exact map, on a text, and cuts",
    "count": "parameters, FLOPs and memory of a model, exact and by the paper's formulas",
    "bench": "speed and memory side by side, as ratios measured in one run",
    "moments": "how variance moves through storage and retrieval: theory, measurement, paper",
}

#: Commands whose file cannot have their name.
FILES = {"import": "import_"}

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"rmt {version('residual-matrix-transformer')}")
        return 0
    name, *rest = arguments
    try:
        if name not in COMMANDS:
            raise InputError(f"there is no command {name!r}. {suggest(name, COMMANDS)}")
        command = importlib.import_module(f"rmt.commands.{FILES.get(name, name)}")
        return command.run(command.parser().parse_args(rest)) or 0
    except InputError as error:
        return fail(str(error))
    except RunFailed as error:
        return fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output (`rmt ... | head`) has gone: nothing left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def fail(message: str, status: int = EXIT_BAD_INPUT) -> int:
    print(f"rmt: {' '.join(message.split())}", file=sys.stderr)
    return status


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return (
        "usage: rmt COMMAND ...\n\n"
        "Train, compare, understand and ship language models with a wide residual stream.\n\n"
        f"commands:\n{lines}\n\n"
        "`rmt COMMAND --help` explains a command and its options."
    )


if __name__ == "__main__":
    sys.exit(main())
