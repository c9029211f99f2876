"""Drawing text from a model, one token at a time, with a cache of keys and values.

Axes: B batch, T tokens, W vocabulary.
"""

import torch
from torch import Tensor

from rmt.model import LanguageModel


def choose(
    logits_BW: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """The next token of each sequence [B, 1]. Temperature 0 takes the most likely."""
    if temperature == 0:
        return logits_BW.argmax(-1, keepdim=True)
    logits_BW = logits_BW.float() / temperature
    if top_k is not None and top_k < logits_BW.shape[-1]:
        least = logits_BW.topk(top_k).values[:, -1:]
        logits_BW = logits_BW.masked_fill(logits_BW < least, float("-inf"))
    if top_p is not None and top_p < 1:
        ordered, order = logits_BW.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        ordered = ordered.masked_fill(before >= top_p, float("-inf"))  # the first is always kept: before it is 0
        logits_BW = torch.empty_like(logits_BW).scatter(1, order, ordered)
    return torch.multinomial(logits_BW.softmax(-1), 1, generator=generator)


@torch.no_grad()
def sample(
    model: LanguageModel,
    prompt_BT: Tensor,
    max_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Prompts [B, T] of equal length, continued by up to `max_tokens` tokens (fewer where the context ends).

    With `stop`, a sequence that has produced that token repeats it, and drawing ends when all have.
    """
    was_training = model.training
    model.eval()
    room = min(max_tokens, model.config.context - prompt_BT.shape[1])
    cache = model.new_cache(prompt_BT.shape[0], prompt_BT.shape[1] + room)
    generator = torch.Generator(device=prompt_BT.device).manual_seed(seed)
    done = torch.zeros(prompt_BT.shape[0], 1, dtype=torch.bool, device=prompt_BT.device)
    new, pieces = prompt_BT, [prompt_BT]
    for _ in range(room):
        hidden_BTD = model(new, cache=cache).hidden_BTD[:, -1]
        new = choose(model.unembedding(hidden_BTD), temperature, top_k, top_p, generator)
        if stop is not None:
            new = new.masked_fill(done, stop)
            done |= new == stop
        pieces.append(new)
        if bool(done.all()):
            break
    model.train(was_training)
    return torch.cat(pieces, dim=1)
