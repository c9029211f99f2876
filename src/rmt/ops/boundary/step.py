"""What the versions of the boundary are given: one record for all of them, and the types of what they return.

Axes: see the package.
"""

from typing import NamedTuple

from torch import Tensor

from rmt.config import Norm

Stats = tuple[Tensor, Tensor]  # mean_N and 1 / deviation rstd_N of the norm
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # of d_NRV, write_KR, gain_KV, read_PK


class Norming(NamedTuple):
    """How the stream is normalised before a read."""

    kind: Norm
    eps: float


class Step(NamedTuple):
    """One boundary: `d` is written to `X` in place with the keys `write`, then `read` reads from the normalised X.

    Keys and gain have the stream's dtype and are contiguous; `d` may be of another dtype, and its tokens may lie apart.
    """

    X_NKV: Tensor
    first: bool  # X holds nothing before the write
    d_NRV: Tensor
    write_KR: Tensor
    gain_KV: Tensor
    read_PK: Tensor
    norm: Norming

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """N, K, V, R, P."""
        return *self.X_NKV.shape, self.write_KR.shape[1], self.read_PK.shape[0]
