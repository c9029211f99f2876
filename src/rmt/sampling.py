"""Drawing text from a model, one token at a time, with a cache of keys and values.

`draw` yields tokens as they come, `sample` returns them all. Prompts of different lengths are put side by side by
`left_pad`: padding stands before a prompt, is a document of its own, so nothing attends to it, and takes no position.

Axes: B batch, T tokens, W vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rmt.errors import InputError
from rmt.model import LanguageModel


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: 0 takes the most likely token; higher is more random.
        top_k: draw only from so many most likely tokens.
        top_p: draw only from the most likely tokens that have this probability together.
        stop: a sequence that has produced this token repeats it, and drawing ends when all have.
        seed: of the draws.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    stop: int | None = None
    seed: int = 0


def choose(logits_BW: Tensor, how: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """The next token of each sequence [B, 1]."""
    if how.temperature == 0:
        return logits_BW.argmax(-1, keepdim=True)
    logits_BW = logits_BW.float() / how.temperature
    if how.top_k is not None and how.top_k < logits_BW.shape[-1]:
        least = logits_BW.topk(how.top_k).values[:, -1:]
        logits_BW = logits_BW.masked_fill(logits_BW < least, float("-inf"))
    if how.top_p is not None and how.top_p < 1:
        ordered, order = logits_BW.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        ordered = ordered.masked_fill(before >= how.top_p, float("-inf"))  # the first is always kept: before it is 0
        logits_BW = torch.empty_like(logits_BW).scatter(1, order, ordered)
    return torch.multinomial(logits_BW.softmax(-1), 1, generator=generator)


def left_pad(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Prompts of any lengths as ids [B, T] and their mask, 1 for the prompt and 0 for the padding before it."""
    length = max(map(len, prompts))
    ids_BT = torch.tensor([[pad] * (length - len(prompt)) + list(prompt) for prompt in prompts])
    mask_BT = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids_BT, mask_BT


@torch.no_grad()
def draw(
    model: LanguageModel,
    prompt_BT: Tensor,
    max_tokens: int,
    how: Sampling = Sampling(),  # noqa: B008 -- frozen
    *,
    mask_BT: Tensor | None = None,
) -> Iterator[Tensor]:
    """The tokens [B, 1] that continue the prompts, one step after another; the arguments are those of `sample`."""
    batch, length = prompt_BT.shape
    if length > model.config.context:
        raise InputError(f"the prompt has {length} tokens, the context is {model.config.context}: shorten it.")
    room = min(max_tokens, model.config.context - length)
    cache = model.new_cache(batch, length + room)
    generator = torch.Generator(device=prompt_BT.device).manual_seed(how.seed)
    done = torch.zeros(batch, 1, dtype=torch.bool, device=prompt_BT.device)
    padded = mask_BT is not None and not bool(mask_BT.all())
    documents = mask_BT if padded else None
    positions = (mask_BT.cumsum(-1) - 1).clamp(min=0) if padded and mask_BT is not None else None
    new = prompt_BT
    for _ in range(room):
        hidden_BTD = model(new, cache=cache, document_ids=documents, position_ids=positions).hidden_BTD[:, -1]
        new = choose(model.unembedding(hidden_BTD), how, generator)
        if how.stop is not None:
            new = new.masked_fill(done, how.stop)
            done |= new == how.stop
        documents = None  # a new token belongs to the document of the one before it
        positions = None if positions is None else positions[:, -1:] + 1
        yield new
        if bool(done.all()):
            return


def sample(
    model: LanguageModel,
    prompt_BT: Tensor,
    max_tokens: int,
    how: Sampling | None = None,
    *,
    mask_BT: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Prompts [B, T], continued by up to `max_tokens` tokens (fewer where the context ends).

    Args:
        model: the network; its training mode is restored afterwards.
        prompt_BT: token ids, all of one length; see `left_pad` for others.
        max_tokens: most tokens to add.
        how: temperature and the like.
        mask_BT: 0 where a prompt is padded on the left.
        options: fields of `Sampling`, as another way to give `how`.
    """
    was_training = model.training
    model.eval()
    try:
        pieces = list(draw(model, prompt_BT, max_tokens, how or Sampling(**options), mask_BT=mask_BT))
    finally:
        model.train(was_training)
    return torch.cat([prompt_BT, *pieces], dim=1)
