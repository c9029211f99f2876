"""Several processes that train one model, on torch's own engine. Alone, everything here does nothing.

`torchrun` starts the processes; `joined` connects them (gloo on CPUs, NCCL on GPUs) and gives each its `World`. The
batch of a step is cut into equal slices in the order of the ranks, so that the order of the data does not depend on
how many there are. Two ways to share the work, `train.parallel`:

fsdp   `fully_shard`: each process keeps a slice of every weight, gradient and moment. Weights are gathered layer by
       layer in the forward pass and stay until the layer's backward pass is over, because a matrix stream that is
       rebuilt in the backward pass reads them again, and because a stream may use one part at several layers.
ddp    every process keeps everything, and gradients are averaged.

Process 0 alone reads and writes files. What it must tell the others goes over the network as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rmt.errors import InputError, RunFailed

T = TypeVar("T")
JOIN_SECONDS = 1800.0


@dataclass(frozen=True)
class World:
    """The processes that train together, seen from one of them."""

    rank: int = 0
    size: int = 1
    restarts: int = 0  # how often torchrun has started all of them again

    @property
    def first(self) -> bool:
        return self.rank == 0

    def rows(self, batch: int) -> slice:
        """This process's part of a batch."""
        share = batch // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def sum(self, values: Tensor) -> Tensor:
        """Of a tensor on the CPU, over all processes; every process gets the same."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: int) -> int:
        if self.size == 1:
            return value
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def wait(self) -> None:
        """Until all processes are here."""
        self.largest(0)

    def share(self, value: Any) -> Any:
        """Process 0's value (plain data) for everybody."""
        if self.size == 1:
            return value
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8) if self.first else None
        length = self.largest(len(text) if text is not None else 0)
        text = torch.empty(length, dtype=torch.uint8) if text is None else text
        dist.broadcast(text, 0)
        return json.loads(text.numpy().tobytes())

    def first_does(self, action: Callable[[], T]) -> T | None:
        """Process 0 does something that may fail, and says why; then all of them end, with the same exit status."""
        result, failure = None, None
        if self.first:
            try:
                result = action()
            except (InputError, RunFailed) as error:
                failure = error
        told = self.share(None if failure is None else 2 if isinstance(failure, InputError) else 1)
        if failure is not None:
            raise failure
        if told is not None:
            raise SystemExit(told)
        return result

    def fill(self, target: Tensor, content: Tensor | None) -> None:
        """Give `target`, or every process's slice of it, the content that process 0 has."""
        if self.size == 1:
            assert content is not None
            target.copy_(content)
        elif is_sliced(target):
            from torch.distributed.tensor import distribute_tensor

            source = torch.empty(target.shape, dtype=target.dtype) if content is None else content.to(target.dtype)
            mesh, placements = target.device_mesh, target.placements  # type: ignore[attr-defined]
            target.copy_(distribute_tensor(source.to(target.device), mesh, placements))
        else:
            if content is not None:
                target.copy_(content)
            dist.broadcast(target, 0)


ALONE = World()


def is_first() -> bool:
    """Whether this process is the one that talks to people (before the processes are connected)."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[tuple[World, torch.device]]:
    """Connect the processes that torchrun started, and say which device is this one's. Without torchrun: alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        yield ALONE, device
        return
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    world = World(int(os.environ["RANK"]), size, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    already = dist.is_initialized()
    if not already:
        store = fresh_store(next(dist.rendezvous("env://", world.rank, size))[0], world)
        # CPU tensors, such as the agreement on signals, travel by gloo also between GPUs.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=size)
    with explained_connection():
        yield world, device
    if not already:  # not after a failure: the others may be gone, and the process ends anyway
        dist.destroy_process_group()


def fresh_store(store: dist.Store, world: World) -> dist.Store:
    """A part of torchrun's key-value store that no earlier attempt has written to.

    torchrun keeps the store when it starts the processes again, and they would look for each other at the addresses of
    the dead (https://github.com/pytorch/pytorch/issues/135712). So each draws a number; process 0 answers with the
    numbers it has seen and its own, which is the name of this attempt; who finds itself seen confirms under that name.
    """
    number = secrets.token_hex(8)
    deadline = time.monotonic() + JOIN_SECONDS
    if not world.first:
        store.set(f"rmt/number/{world.rank}", number)
    while True:
        if world.first:
            others = [str(rank) for rank in range(1, world.size)]
            arrived = [rank for rank in others if store.check([f"rmt/number/{rank}"])]
            seen = {rank: store.get(f"rmt/number/{rank}").decode() for rank in arrived}
            store.set("rmt/answer", json.dumps({"attempt": number, "seen": seen}))
            if all(store.check([f"rmt/{number}/{rank}"]) for rank in others):
                return dist.PrefixStore(f"rmt/{number}", store)
        elif store.check(["rmt/answer"]):
            answer = json.loads(store.get("rmt/answer"))
            if answer["seen"].get(str(world.rank)) == number:
                store.set(f"rmt/{answer['attempt']}/{world.rank}", "here")
                return dist.PrefixStore(f"rmt/{answer['attempt']}", store)
        if time.monotonic() > deadline:
            raise RunFailed(f"the {world.size} processes of this run did not find each other: were all started?")
        time.sleep(0.05)


@contextlib.contextmanager
def explained_connection() -> Iterator[None]:
    """The loss of another process as one line."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection closed" in str(error)
        if isinstance(error, RunFailed) or not lost:
            raise
        raise RunFailed(
            "another process of this run has ended, so this one cannot go on. The last checkpoint is safe: start all "
            "of them again with --resume (torchrun --max-restarts does it by itself)."
        ) from error


def distribute(model: nn.Module, parallel: str, world: World) -> nn.Module:
    """Share a model among the processes; returns what to call for the forward pass.

    With fsdp the parameters of `model` are replaced: make the optimizer afterwards.
    """
    if world.size == 1:
        return model
    device = next(model.parameters()).device
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=None if device.index is None else [device.index])
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # The warning is about changing in place what a wrapped module returned; nothing here does that.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    mesh = init_device_mesh(device.type, (world.size,))
    for unit in units(model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)  # the rest: the unembedding
    return model


def units(model: Any) -> Iterator[list[nn.Module]]:
    """What is gathered together: the embedding with the first boundary, then layer by layer.

    A boundary hands the weights of its parts to one operation, so a boundary is never cut.
    """
    yield [model.embedding, model.stream[0]]
    for layer in range(model.config.layers):
        first, second = model.stream[2 * layer + 1], model.stream[2 * layer + 2]
        yield [model.attention[layer], first, model.feed_forward[layer], second]


def sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]


@contextlib.contextmanager
def communicating(module: Any, last: bool) -> Iterator[None]:
    """Around the forward and backward pass of one micro-batch: gradients travel after the last one only."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        with contextlib.nullcontext() if last else module.no_sync():
            yield
        return
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(last)
        module.set_reshard_after_backward(last)  # and weights are gathered for the first one only
    yield


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Every process has all weights, for forward passes that the processes do not make together."""
    modules = sharded_modules(model)
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()


def is_sliced(tensor: Any) -> bool:
    """Whether a process holds a slice only (a DTensor)."""
    return hasattr(tensor, "full_tensor")


def own(tensor: Any) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if is_sliced(tensor) else tensor


def whole(tensor: Any) -> Tensor:
    """All of a tensor; a call that all processes make together."""
    return tensor.full_tensor() if is_sliced(tensor) else tensor


def joint_norm(norm: Tensor) -> Tensor:
    """The norm of what all processes hold, from that of what each holds."""
    square = norm.double().square()
    dist.all_reduce(square)
    return square.sqrt().to(norm.dtype)
