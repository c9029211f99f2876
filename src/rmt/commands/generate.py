"""`rmt generate`: text from a model."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmt.commands.base import ArgumentParser, Formatter, print_json
from rmt.errors import InputError

if TYPE_CHECKING:
    from rmt.hub.folder import Loaded

DESCRIPTION = """\
Continue prompts with a trained or exported model.

  rmt generate runs/first --prompt "My fellow citizens" --temperature 0.8 --top-k 50
  rmt generate exported/first --prompt "One" "Two" "Three" --max-tokens 40     # a batch
  rmt generate runs/first --file prompts.txt --json > answers.json            # a prompt per line; - is stdin
  rmt generate runs/first                                                     # asks for prompts

Temperature 0 takes the most likely token each time. The speed goes to stderr."""


def parser() -> ArgumentParser:
    result = ArgumentParser(prog="rmt generate", description=DESCRIPTION, formatter_class=Formatter)
    result.add_argument("model", metavar="RUN|DIR", help="run directory or exported folder")
    result.add_argument("--prompt", type=str, nargs="+", help="what to continue; several are one batch")
    result.add_argument("--file", type=str, metavar="F", help="a prompt per line; - reads stdin")
    result.add_argument("--max-tokens", type=int, default=100, help="tokens to add, at most [100]")
    result.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token [1]")
    result.add_argument("--top-k", type=int, help="draw from the so many most likely tokens")
    result.add_argument("--top-p", type=float, help="draw from the most likely tokens of this probability together")
    result.add_argument("--seed", type=int, default=0, help="of the draws [0]")
    result.add_argument("--stream", action="store_true", help="show tokens as they come; prompts one after another")
    result.add_argument("--batch", type=int, default=16, help="prompts at a time [16]")
    result.add_argument("--checkpoint", type=str, default="best", help="of a run: best, latest or a step [best]")
    result.add_argument("--tokenizer", type=str, metavar="gpt2|DIR", help="instead of the model's own")
    result.add_argument("--device", type=str, help="cpu, cuda, mps (default: a GPU if there is one)")
    result.add_argument("--json", action="store_true", help="print prompts and texts as JSON")
    return result


def run(args: Any) -> None:
    check(args)
    prompts = given_prompts(args)
    from rmt.hub.folder import load_model
    from rmt.train.loop import find_device

    loaded = load_model(
        args.model, checkpoint=args.checkpoint, tokenizer=args.tokenizer, device=find_device(args.device)
    )
    writer = Writer(loaded, args)
    if prompts is None:
        writer.converse()
    elif args.stream:
        for prompt in prompts:
            writer.stream(prompt)
    else:
        batches = [prompts[start : start + args.batch] for start in range(0, len(prompts), args.batch)]
        texts = [text for batch in batches for text in writer.batch(batch)]
        show(prompts, texts, args.json)
    writer.report()


def check(args: Any) -> None:
    if args.prompt and args.file:
        raise InputError("generate: give --prompt or --file, not both.")
    if args.stream and args.json:
        raise InputError("generate: --stream and --json do not go together.")
    for name, good, rule in (
        ("max_tokens", args.max_tokens >= 1, "at least 1"),
        ("temperature", args.temperature >= 0, "0 or more"),
        ("top_k", args.top_k is None or args.top_k >= 1, "at least 1"),
        ("top_p", args.top_p is None or 0 < args.top_p <= 1, "above 0 and at most 1"),
        ("batch", args.batch >= 1, "at least 1"),
    ):
        if not good:
            raise InputError(f"generate: --{name.replace('_', '-')} must be {rule}, got {getattr(args, name)}.")


def given_prompts(args: Any) -> list[str] | None:
    """The prompts of the command line, a file or stdin; None if somebody sits at a terminal and gave none."""
    if args.prompt:
        return args.prompt
    if args.file is None and sys.stdin.isatty():
        return None
    if args.file in (None, "-"):
        text = sys.stdin.read()
    else:
        try:
            text = Path(args.file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the prompts in {args.file}: {error}.") from None
    prompts = [line for line in text.splitlines() if line]
    if not prompts:
        raise InputError("generate: there is no prompt. Give --prompt, or one per line in --file.")
    return prompts


def show(prompts: list[str], texts: list[str], as_json: bool) -> None:
    if as_json:
        print_json([{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)])
    elif len(prompts) == 1:
        print(prompts[0] + texts[0])
    else:
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
            print(f"=== {number}\n{prompt}{text}\n")


class Writer:
    """Continues prompts as the options say, and counts tokens and seconds."""

    def __init__(self, loaded: "Loaded", args: Any) -> None:
        self.loaded, self.max_tokens = loaded, args.max_tokens
        self.device = next(loaded.model.parameters()).device
        self.options = dict(
            temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed, stop=loaded.eot
        )
        self.tokens, self.seconds = 0, 0.0

    def encode(self, prompt: str) -> list[int]:
        ids = self.loaded.tokenizer.encode(prompt, add_special_tokens=False).ids or [self.loaded.eot]
        if len(ids) >= self.loaded.model.config.context:
            raise InputError(
                f"the prompt has {len(ids)} tokens and fills the context of {self.loaded.model.config.context}: "
                "shorten it."
            )
        return ids

    def draw(self, prompts: list[str]) -> Iterator[list[int]]:
        """The new token of every prompt, step by step."""
        from rmt.sampling import Sampling, draw, left_pad

        ids_BT, mask_BT = left_pad([self.encode(prompt) for prompt in prompts], self.loaded.eot)
        ids_BT, mask_BT = ids_BT.to(self.device), mask_BT.to(self.device)
        began = time.perf_counter()
        for new in draw(self.loaded.model, ids_BT, self.max_tokens, Sampling(**self.options), mask_BT=mask_BT):
            self.tokens += len(prompts)
            self.seconds += time.perf_counter() - began
            yield new[:, 0].tolist()
            began = time.perf_counter()

    def batch(self, prompts: list[str]) -> list[str]:
        steps = list(self.draw(prompts))
        return [self.decode(self.until_end([step[row] for step in steps])) for row in range(len(prompts))]

    def stream(self, prompt: str) -> None:
        """Print as soon as what was drawn is whole characters."""
        print(prompt, end="", flush=True)
        ids: list[int] = []
        shown = ""
        for (new,) in self.draw([prompt]):
            ids.append(new)
            text = self.decode(self.until_end(ids))
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                print(text[len(shown) :], end="", flush=True)
                shown = text
        print(flush=True)

    def converse(self) -> None:
        print("An empty line or Ctrl-D ends this.", file=sys.stderr)
        while True:
            try:
                prompt = input("> ")
            except EOFError:
                print()
                return
            if not prompt:
                return
            self.stream(prompt)

    def until_end(self, ids: list[int]) -> list[int]:
        return ids[: ids.index(self.loaded.eot)] if self.loaded.eot in ids else ids

    def decode(self, ids: list[int]) -> str:
        return self.loaded.tokenizer.decode(ids)

    def report(self) -> None:
        if self.tokens and self.seconds:
            speed = self.tokens / self.seconds
            print(f"{self.tokens} tokens in {self.seconds:.2f} s: {speed:.0f} tokens/s", file=sys.stderr)
