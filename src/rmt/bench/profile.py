"""Where the time of one training step goes: seconds by kind of work, from PyTorch's profiler.

Each operation's own time goes to the kind of the outermost operation around it that is known: a matrix multiplication
inside the loss is loss. Our C++ kernels count for the operation that calls them. What no operation covers (Python,
waiting) is `other`, so the kinds add up to the step.
"""

import time
from collections.abc import Callable
from typing import Any

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

#: Kinds from the outermost; the first whose words occur in a name decides. `gemm` is all other products.
KINDS: dict[str, tuple[str, ...]] = {
    "optimizer": ("optimizer.step", "_fused_adam"),
    "clipping": ("_foreach_norm", "_foreach_mul", "linalg_vector_norm"),
    "loss": ("_chunked", "cross_entropy", "log_softmax", "nll_loss", "logsumexp"),
    "boundary": ("_writeread",),
    "attention": ("_attention", "scaled_dot_product"),
    "activation": ("gelu", "silu"),
    "norm": ("layer_norm", "native_layer_norm", "rms_norm"),
    "gemm": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul", "mmbackward"),
}
#: Operations whose own time is a kernel of ours, while the products that they call count for themselves.
OWN_TIME = {"_feedforward": "activation"}
OTHER = "other"
PARTS = (*KINDS, OTHER)


def step_profile(step: Callable[[], object], times: int = 3) -> dict[str, float]:
    """Seconds of each kind in a call of `step`, which has been called before: the call of median length."""
    profiles = sorted((profile_once(step) for _ in range(times)), key=lambda seconds: sum(seconds.values()))
    return profiles[times // 2]


def profile_once(step: Callable[[], object]) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        began = time.perf_counter()
        step()
        whole = time.perf_counter() - began
    seconds = dict.fromkeys(PARTS, 0.0)
    for event in watched.events() or []:
        seconds[kind_of(event)] += event.self_cpu_time_total / 1e6
    covered = sum(seconds[kind] for kind in KINDS)
    seconds[OTHER] = max(0.0, whole - covered)
    return seconds


def kind_of(event: FunctionEvent) -> str:
    """The kind of the outermost known operation around an event, or of the event itself."""
    found = next((kind for word, kind in OWN_TIME.items() if word in event.name.lower()), OTHER)
    around: Any = event
    while around is not None:
        found = kind_named(around.name) or found
        around = around.cpu_parent
    return found


def kind_named(name: str) -> str | None:
    name = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), None)
