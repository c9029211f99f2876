"""From text to batches: sources -> tokenizer -> checksummed token shards -> an order that is a pure function.

`prepare` writes a token dataset, `verify` checks one, `TokenDataset` reads it, `Order` says which windows a step
uses and `Prefetcher` has them ready before the step needs them. Nothing here imports torch.
"""

from rmt.data.dataset import TokenDataset, document_ids
from rmt.data.manifest import verify
from rmt.data.order import Order
from rmt.data.pipeline import prepare
from rmt.data.prefetch import Prefetcher

__all__ = ["Order", "Prefetcher", "TokenDataset", "document_ids", "prepare", "verify"]
