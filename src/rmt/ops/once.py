"""The fast operations have first derivatives only; asking for more is refused instead of being silently zero."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def once_differentiable(backward: Callable) -> Callable:
    """Decorates the backward pass of an operation whose gradient is not itself differentiable."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # the engine says so when a graph of the gradient is wanted
            raise RuntimeError(
                "the fast operations cannot be differentiated twice (create_graph=True): "
                'use model.set_ops("plain"), which can.'
            )
        return backward(ctx, *grads)

    return checked
