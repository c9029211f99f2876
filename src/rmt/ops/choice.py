"""Which version of the hot operations runs: the names a user can choose, and what each choice means for a tensor.

plain      the definition in ordinary PyTorch; every intermediate is kept, so every kind of gradient works
portable   PyTorch only, any device and dtype: chunked, in place, the stream rebuilt in the backward pass
native     C++ for the CPU in float32, compiled on first use; where it does not apply, portable
triton     kernels for CUDA and ROCm with a float32 stream; where they do not apply, portable
auto       native on the CPU if it can be compiled, triton on a GPU if it is installed, else portable
"""

import functools
import importlib.util
import os

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rmt.config import Ops
from rmt.errors import InputError, suggest
from rmt.ops.native import build

OPS = ("auto", "plain", "portable", "native", "triton")


def check(name: str, device: torch.device) -> None:
    """Refuse a choice that does not exist or cannot run here, in one line."""
    if name not in OPS:
        raise InputError(f"there are no ops {name!r}. {suggest(name, OPS)}")
    if name == "native" and (problem := build.problem()):
        raise InputError(f"ops 'native' cannot run here: {problem} Use 'portable' or 'auto'.")
    if name == "native" and device.type not in ("cpu", "meta"):
        raise InputError(f"ops 'native' is for the CPU, the model is on {device.type}. Use 'auto'.")
    if name == "triton" and not has_triton():
        raise InputError("ops 'triton' needs the triton package: install it (pip install triton), or use 'auto'.")
    if name == "triton" and device.type not in ("cuda", "meta") and not interprets_triton():
        raise InputError(f"ops 'triton' needs a GPU, the model is on {device.type}. Use 'auto'.")


def choose(name: Ops, x: torch.Tensor) -> Ops:
    """What `name` means for operations on `x`: never "auto", and always something that works."""
    if name == "plain" or is_watched(x):
        return "plain"
    if name in ("auto", "native") and x.device.type == "cpu" and x.dtype == torch.float32 and not build.problem():
        return "native"
    on_gpu = x.device.type == "cuda" or (name == "triton" and interprets_triton())
    if name in ("auto", "triton") and on_gpu and has_triton():
        return "triton"
    return "portable"


def is_watched(x: torch.Tensor) -> bool:
    """Somebody looks at every single PyTorch operation: the compiler, a FLOP counter, tensors without values."""
    return torch.compiler.is_compiling() or x.is_meta or is_counted()


def is_counted() -> bool:
    """A dispatch mode is active, such as a FLOP counter, to which a fused operation would be one unknown."""
    return not torch.compiler.is_compiling() and _get_current_dispatch_mode() is not None


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interprets_triton() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
