"""Time per token of decoding with a key/value cache: batch 1, always the likeliest token.

The comparison is transformers' GPT-2 of the same dimensions, in a bare loop over its forward pass, which is faster than
its `generate`. All start from the same number of cached tokens.
"""

import copy
import os
from collections.abc import Callable

import torch

from rmt.bench.cases import Case
from rmt.model import LanguageModel, build

PROMPT = 32  # tokens in the cache at the start
NEW = 32  # tokens drawn

Function = Callable[[], object]


def functions(case: Case) -> dict[str, Function]:
    """`NEW` tokens for each row. The plain operations are no way to decode, and there is no stock one."""
    made: dict[str, Function] = {}
    if "gpt2" in case.rows:
        made["gpt2"] = gpt2(case)
    if "vector" in case.rows:
        made["vector"] = ours(build(case.vector), "auto")
    matrix = build(case.config)
    return made | {row: ours(matrix, row) for row in case.matrix_rows if row != "plain" or len(case.matrix_rows) == 1}


def ours(model: LanguageModel, ops: str) -> Function:
    cache = model.new_cache(1, PROMPT + NEW)
    prompt = torch.randint(0, model.config.vocab_size, (1, PROMPT))
    with torch.no_grad():
        model(prompt, cache=cache)

    @torch.no_grad()
    def run() -> None:
        model.set_ops(ops)
        cache.rewind(PROMPT)
        token = prompt[:, -1:]
        for _ in range(NEW):
            token = model(token, cache=cache).logits[:, -1].argmax(-1, keepdim=True)

    return run


def gpt2(case: Case) -> Function:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import GPT2Config, GPT2LMHeadModel

    config = case.config
    ends = dict(bos_token_id=0, eos_token_id=0)
    dims = dict(n_embd=config.model_dim, n_layer=config.layers, n_head=config.heads, n_inner=config.ff_dim)
    model = GPT2LMHeadModel(GPT2Config(**dims, n_positions=config.context, vocab_size=config.vocab_size, **ends)).eval()  # type: ignore[arg-type]
    prompt = torch.randint(0, config.vocab_size, (1, PROMPT))
    with torch.no_grad():
        start = model(prompt, use_cache=True).past_key_values

    @torch.no_grad()
    def run() -> None:
        cache = copy.deepcopy(start)
        token = prompt[:, -1:]
        for _ in range(NEW):
            output = model(token, past_key_values=cache, use_cache=True)
            token = output.logits[:, -1].argmax(-1, keepdim=True)

    return run
