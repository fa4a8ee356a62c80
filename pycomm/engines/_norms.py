"""The norm of one gradient, of which those of all are made up: in float32 at least, also of complex numbers."""

from __future__ import annotations

import torch

__all__ = ["norm_of"]


def norm_of(gradient: torch.Tensor, norm_type: float = 2.0) -> torch.Tensor:
    """Returns the norm of ``gradient``, ``()``, of half precision in float32; complex numbers count by their size."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
    return norm
