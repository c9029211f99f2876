"""The model card: what the model is, what it was trained on and with what result, how to use it, what to expect."""

import shlex
from pathlib import Path
from typing import Any

from rmt.hub.folder import Loaded
from rmt.theory.accounting import count

USE = """\
```python
import rmt  # pip install residual-matrix-transformer
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
```
"""

WITH_CODE = """\
The folder also carries the modelling code: without the package, load it with `trust_remote_code=True` after reading
`modeling_rmt.py` and the files it imports.
"""

LIMITS = """\
A base language model: it continues text and follows no instructions. It can produce false, offensive or private text
from its training data; it has had no safety training. It reads at most {context} tokens at once. Quality outside the
kind of text it was trained on is unknown.
"""


def model_card(loaded: Loaded, name: str, with_code: bool = False) -> str:
    config, record = loaded.model.config, loaded.record
    kind = {"matrix": "Residual Matrix Transformer", "vector": "Transformer"}.get(config.stream, config.stream)
    header = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- rmt\n- residual-stream\n---\n"
    parts = [
        f"{header}\n# {name}\n",
        f"{kind}: a language model with the `{config.stream}` residual stream, made with `rmt`.\n",
        f"## Use\n\n{USE.format(name=name)}",
        *([WITH_CODE] if with_code else []),
        f"## Training\n\n{table(training_rows(loaded))}",
        f"The command:\n\n```\n{command(record)}\n```\n" if record.get("command") else "",
        f"## Configuration\n\n{table([(key, value) for key, value in config.to_dict().items() if key != 'mup'])}",
        f"## Limits\n\n{LIMITS.format(context=config.context)}",
    ]
    return "\n".join(part for part in parts if part)


def training_rows(loaded: Loaded) -> list[tuple[str, Any]]:
    record, cost = loaded.record, count(loaded.model.config)
    tokens = record.get("tokens")
    tokenizer = loaded.tokenizer_file
    rows: list[tuple[str, Any]] = [
        ("parameters", f"{int(cost.params):,}"),
        ("training tokens", f"{tokens:,}" if tokens else None),
        ("optimizer steps", record.get("step")),
        ("training FLOPs", f"{cost.flops.training(tokens):.3g}" if tokens else None),
        ("dev loss (nats per token)", number(record.get("dev_ce"))),
        ("training loss at the last step", number(record.get("train_ce"))),
        ("data fingerprint", (record.get("data") or {}).get("fingerprint")),
        ("tokenizer", f"tokenizer.json, sha256 {tokenizer.sha256[:16]}" if tokenizer else None),
        ("git commit", record.get("git_commit")),
    ]
    return [row for row in rows if row[1] not in (None, "")]


def number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def table(rows: list[tuple[str, Any]]) -> str:
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def command(record: dict[str, Any]) -> str:
    """As it was typed, without the folder in which the program is installed."""
    program, *arguments = record["command"]
    name = Path(program).stem
    return shlex.join(["rmt" if name in ("__main__", "cli") else name, *arguments])
