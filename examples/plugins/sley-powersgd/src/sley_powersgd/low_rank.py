"""Compresses one gradient into the product of two thin matrices: the state of a rank, and the local computations between the
collectives.

    project:  G <- G + error;  P = G Q             then P is summed over the ranks
    expand:   P <- orthonormal(P);  Q = G^T P      then Q is summed over the ranks
              error = G - P Q^T, before the sum
    restore:  G = P Q^T

Vogels, Karimireddy, Jaggi (2019), PowerSGD, algorithms 1 and 2. The sum of all ranks' gradients is projected onto the span of
P. This is one step of a power iteration, which starts from the previous step's result. Each rank keeps the residual of the
projection (the error) and adds it in the next step, so that no gradient is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_RATE = 2
"""A gradient is compressed if its factors are at most 1 / MIN_RATE as large, as in torch's powerSGD_hook."""


def view_as_matrix(gradient: Tensor, rank: int) -> Tensor | None:
    """Returns `gradient` as a view [first dim, product of the others], or None if factors of `rank` columns would not be much
    smaller.
    """
    if gradient.ndim < 2:
        return None
    num_rows = gradient.shape[0]
    num_columns = gradient.shape[1:].numel()
    if (num_rows + num_columns) * min(rank, num_rows, num_columns) * MIN_RATE >= num_rows * num_columns:
        return None
    return gradient.view(num_rows, num_columns)


def orthonormal(columns: Tensor) -> Tensor:
    """Returns an orthonormal basis of the span of `columns`, with as many columns.

    QR returns a basis even for a zero gradient, from which the power iteration can recover. With Gram-Schmidt, zeros would stay
    zeros, and the parameter would never be trained again.
    """
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


class LowRank:
    """Holds the compression state of one gradient [n, m].

    q: [m, r], orthonormal, equal on all ranks, with r at most `rank`. error: [n, m], the error of this rank, or None without
    feedback.
    """

    def __init__(self, gradient: Tensor, rank: int, seed: int, error_feedback: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(gradient.shape[1], min(rank, *gradient.shape), generator=generator, dtype=gradient.dtype)
        self.q = orthonormal(start.to(gradient.device))
        self.error = torch.zeros_like(gradient) if error_feedback else None

    @classmethod
    def restored(cls, q: Tensor, error: Tensor | None) -> LowRank:
        """Returns the state with these tensors."""
        state = cls.__new__(cls)
        state.q, state.error = q, error
        return state

    def project(self, gradient: Tensor, p: Tensor) -> None:
        """Adds the error to `gradient`, in place, and writes `gradient` q to `p` [n, r]."""
        if self.error is not None:
            gradient.add_(self.error)
        torch.mm(gradient, self.q, out=p)

    def expand(self, gradient: Tensor, p: Tensor, q: Tensor) -> None:
        """Orthonormalizes the summed `p` in place, writes `gradient`^T p to `q` [m, r], and updates the error."""
        p.copy_(orthonormal(p))
        torch.mm(gradient.T, p, out=q)
        if self.error is not None:
            torch.addmm(gradient, p, q.T, alpha=-1, out=self.error)

    def restore(self, gradient: Tensor, p: Tensor, q: Tensor) -> None:
        """Writes the approximation p q^T of the summed gradient to `gradient`. `p` and `q` are sums over ranks.

        Stores q for the next step.
        """
        torch.mm(p, q.T, out=gradient)
        self.q = orthonormal(q)
