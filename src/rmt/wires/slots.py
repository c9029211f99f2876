"""The names of everything that is written to and read from a matrix stream, and of the edges between them.

A *write* is one vector with its key, a *read* one vector with its key:

    writes   token.slot0   position.slot0   layer1.head0        layer1.ff.slot2
    reads    layer3.head2.query (.key, .value)   layer3.ff.slot1   unembedding.slot0

With grouped key/value heads their reads are called layer3.group0.key and layer3.group0.value. Names of several slots at
once: all, layer3, layer3.attention, layer3.head2, layer3.query, layer3.key, layer3.value, layer3.ff, unembedding;
token, position, embedding (both), layer1.attention, layer1.ff. An *edge* is "READ <- WRITE", by either kind of name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rmt.config import ModelConfig
from rmt.errors import InputError, suggest
from rmt.streams.base import Site, sites

Bools = npt.NDArray[np.bool_]
Level = Literal["slots", "heads", "cores"]
LEVELS: tuple[Level, ...] = ("slots", "heads", "cores")


@dataclass(frozen=True)
class Slot:
    """One vector that is written or read, with its key.

    Args:
        name: its own.
        head: the attention head, or the feed-forward core, or the embedding, that it belongs to.
        core: what it belongs to in the map of layers: `layer3.attention`, `layer3.ff`, `token`, `unembedding`, ...
        site: the boundary at which it is written or read (see `rmt.streams.base`), from 0.
        also: further names that stand for it together with others.
    """

    name: str
    head: str
    core: str
    site: int
    also: tuple[str, ...] = ()

    def at(self, level: Level) -> str:
        return {"slots": self.name, "heads": self.head, "cores": self.core}[level]

    @property
    def names(self) -> set[str]:
        return {self.name, self.head, self.core, "all", *self.also}


class Edges(NamedTuple):
    """Some edges under one name: which read sees which write."""

    name: str
    mask_RW: Bools


def write_slots(config: ModelConfig) -> list[Slot]:
    """All writes of a model, in the order of depth."""
    slots: list[Slot] = []
    for site in sites(config.layers):
        layer = f"layer{(site.index - 1) // 2}"
        for core in cores_written(config, site):
            for index in range(config.heads):
                if site.after == "attention":
                    name = head = f"{layer}.head{index}"
                else:
                    name, head = f"{core}.slot{index}", core
                slots.append(Slot(name, head, core, site.index, ("embedding",) if not site.index else (layer,)))
    return slots


def cores_written(config: ModelConfig, site: Site) -> list[str]:
    """What is written at a boundary: token and position at the first one, else one core's output."""
    if site.after == "embedding":
        return ["token", "position"] if config.position == "learned" else ["token"]
    return [f"layer{(site.index - 1) // 2}.{'attention' if site.after == 'attention' else 'ff'}"]


def read_slots(config: ModelConfig) -> list[Slot]:
    """All reads of a model, in the order of depth and, within a boundary, of the model's keys."""
    slots: list[Slot] = []
    for site in sites(config.layers):
        layer = f"layer{site.index // 2}"
        if site.before == "attention":
            shared = "head" if config.kv_groups == config.heads else "group"
            for role, unit, number in (
                ("query", "head", config.heads),
                ("key", shared, config.kv_groups),
                ("value", shared, config.kv_groups),
            ):
                for index in range(number):
                    head = f"{layer}.{unit}{index}"
                    also = (layer, f"{layer}.{role}")
                    slots.append(Slot(f"{head}.{role}", head, f"{layer}.attention", site.index, also))
        else:
            core, above = (f"{layer}.ff", [layer]) if site.before == "feed_forward" else ("unembedding", [])
            slots += [Slot(f"{core}.slot{i}", core, core, site.index, tuple(above)) for i in range(config.heads)]
    return slots


def find(name: str, slots: Sequence[Slot], what: str) -> Bools:
    """Which slots a name stands for."""
    found = np.array([name in slot.names for slot in slots])
    if not found.any():
        known = {known for slot in slots for known in slot.names}
        answer = suggest(name, known)
        if not answer.startswith("Did"):
            answer = f"Names look like {', '.join(slot.name for slot in slots[:: max(1, len(slots) // 3)][:3])}."
        raise InputError(f"there is no {what} {name!r} in this model. {answer}")
    return found


def find_edges(text: str, reads: Sequence[Slot], writes: Sequence[Slot]) -> Edges:
    """The edges that "READ <- WRITE" stands for."""
    parts = [part.strip() for part in text.split("<-")]
    if len(parts) != 2 or not all(parts):
        raise InputError(f"{text!r} is not an edge: write it in quotes as 'READ <- WRITE'.")
    read, write = parts
    mask_RW = np.outer(find(read, reads, "read"), find(write, writes, "write"))
    mask_RW &= causal(reads, writes)
    if not mask_RW.any():
        raise InputError(f"{read} does not see {write}: it is written later. Choose a write from before the read.")
    return Edges(f"{read} <- {write}", mask_RW)


def causal(reads: Sequence[Slot], writes: Sequence[Slot]) -> Bools:
    """[reads, writes]: which read comes after which write. At one boundary the stream is written before it is read."""
    return np.array([[write.site <= read.site for write in writes] for read in reads])


def grouped(slots: Iterable[Slot], level: Level) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The names at a level, in order, and for each slot the place of its name."""
    names = [slot.at(level) for slot in slots]
    order = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return list(order), np.array([order[name] for name in names])
