"""Layers whose weights are cut over the ranks of a group.

Each draws the whole weight as the ordinary layer does and keeps its part, so that with the same seed on every rank it
is that layer, cut; ``of`` cuts a layer that exists. ``is_sequence_parallel``: between pairs of linear layers the
activations ``(batch, length, width)`` are cut along the sequence (dim 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import pycomm

from ...errors import ConfigError
from .._agreement import check_same_model
from .cuts import CutLayer
from .functions import (
    copy_to_ranks,
    find_own,
    gather_dim,
    gather_same,
    scatter_sum,
    sum_gradient,
    sum_over_ranks,
)

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "SequenceParallelLayerNorm", "VocabParallelEmbedding"]

_SEQUENCE = 1


class ColumnParallelLinear(CutLayer):
    """``nn.Linear`` cut along its outputs: ``(..., in)`` to this rank's ``(..., out / world_size)``.

    ``blocks`` > 1: the outputs are so many things side by side, such as q, k and v, and each is cut.
    ``gathers_output`` gives the whole output on every rank instead. Raises ConfigError if the ranks do not divide it.
    """

    _dims = {"weight": 0, "bias": 0}
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: Any = None,
        *,
        blocks: int = 1,
        gathers_output: bool = False,
        is_sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self._take(nn.Linear(in_features, out_features, bias), group, blocks, gathers_output, is_sequence_parallel)

    @classmethod
    def of(
        cls,
        linear: nn.Linear,
        group: Any = None,
        *,
        blocks: int = 1,
        gathers_output: bool = False,
        is_sequence_parallel: bool = False,
    ) -> ColumnParallelLinear:
        """Returns this rank's part of ``linear``. Raises ConfigError for a subclass, and for one that has hooks."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(linear, group, blocks, gathers_output, is_sequence_parallel)
        return layer

    def _take(
        self, linear: nn.Linear, group: Any, blocks: int, gathers_output: bool, is_sequence_parallel: bool
    ) -> None:
        self.group, self.blocks = pycomm.get_group(group), blocks
        self.gathers_output, self.is_sequence_parallel = gathers_output, is_sequence_parallel
        self._check_replaces(linear, nn.Linear)
        _check_divides(self.group, linear.out_features, f"{blocks} x heads or outputs", blocks)
        self._take_part("weight", linear.weight)
        self._take_part("bias", linear.bias)
        self.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x (..., in)``, the same on all ranks (or cut along the sequence), to ``(..., out / world_size)``."""
        x = gather_dim(x, self.group, _SEQUENCE) if self.is_sequence_parallel else copy_to_ranks(x, self.group)
        output = functional.linear(x, self.weight, self.bias)
        if not self.gathers_output:
            return output
        whole = gather_same(output, self.group, -1)  # rank by rank, each with its part of every block
        parts = whole.reshape(*whole.shape[:-1], self.group.world_size, self.blocks, -1)
        return parts.transpose(-3, -2).flatten(-3) if self.blocks > 1 else whole


class RowParallelLinear(CutLayer):
    """``nn.Linear`` cut along its inputs: this rank's ``(..., in / world_size)`` to the whole ``(..., out)``.

    The bias is whole on every rank and added once. With ``is_sequence_parallel`` the output is cut along the sequence.
    """

    _dims = {"weight": 1}
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: Any = None,
        *,
        is_sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self._take(nn.Linear(in_features, out_features, bias), group, is_sequence_parallel)

    @classmethod
    def of(cls, linear: nn.Linear, group: Any = None, *, is_sequence_parallel: bool = False) -> RowParallelLinear:
        """Returns this rank's part of ``linear``. Raises ConfigError for a subclass, and for one that has hooks."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(linear, group, is_sequence_parallel)
        return layer

    def _take(self, linear: nn.Linear, group: Any, is_sequence_parallel: bool) -> None:
        self.group, self.is_sequence_parallel = pycomm.get_group(group), is_sequence_parallel
        self._check_replaces(linear, nn.Linear)
        _check_divides(self.group, linear.in_features, "inputs")
        self._take_part("weight", linear.weight)
        self._take_part("bias", linear.bias)
        self.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's ``x (..., in / world_size)`` to ``(..., out)``, the same on all ranks."""
        partial = functional.linear(x, self.weight)
        if not self.is_sequence_parallel:
            total = sum_over_ranks(partial, self.group)
            return total if self.bias is None else total + self.bias.to(total.dtype)  # under autocast they differ
        total = scatter_sum(partial, self.group, _SEQUENCE)
        return total if self.bias is None else total + sum_gradient(self.bias, self.group).to(total.dtype)


class VocabParallelEmbedding(CutLayer):
    """``nn.Embedding`` cut along the vocabulary: ``tokens (...)`` to ``(..., width)`` on every rank.

    The row ``padding_idx`` gets no gradient. ``max_norm``, ``scale_grad_by_freq`` and ``sparse`` are refused: they go
    by which rows are looked up, and a rank looks up its row 0 in place of those that it does not have.
    """

    _dims = {"weight": 0}
    weight: nn.Parameter

    def __init__(
        self, num_embeddings: int, embedding_dim: int, group: Any = None, *, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        self._take(nn.Embedding(num_embeddings, embedding_dim, padding_idx), group)

    @classmethod
    def of(cls, embedding: nn.Embedding, group: Any = None) -> VocabParallelEmbedding:
        """Returns this rank's part of ``embedding``. Raises ConfigError for one that does more than to look up."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(embedding, group)
        return layer

    def _take(self, embedding: nn.Embedding, group: Any) -> None:
        self.group = pycomm.get_group(group)
        self._check_replaces(embedding, nn.Embedding)
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ConfigError(
                f"VocabParallelEmbedding: max_norm, scale_grad_by_freq and sparse cannot be cut; expected None, False "
                f"and False, got {embedding.max_norm}, {embedding.scale_grad_by_freq} and {embedding.sparse}"
            )
        _check_divides(self.group, embedding.num_embeddings, "entries of the vocabulary")
        self._take_part("weight", embedding.weight)
        self.padding_idx = embedding.padding_idx
        self.train(embedding.training)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """A rank looks up the tokens that it has; the others' count as zeros.

        The tokens are the same on all ranks. Raises ConfigError for one that is not in the vocabulary.
        """
        length = len(self.weight)
        local, is_here = find_own(tokens, length, self.group, "VocabParallelEmbedding")
        padding = -1 if self.padding_idx is None else self.padding_idx - self.group.rank * length
        found = functional.embedding(local, self.weight, padding if 0 <= padding < length else None)
        return sum_over_ranks(found.where(is_here.unsqueeze(-1), 0), self.group)


class SequenceParallelLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` over activations that are cut along the sequence; its parameters are whole on every rank."""

    def __init__(self, normalized_shape: Any, group: Any = None, **options: Any) -> None:
        super().__init__(normalized_shape, **options)
        self.group = pycomm.get_group(group)
        check_same_model(list(self.named_parameters()), self.group, type(self).__name__)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x (batch, length / world_size, width)`` to the same shape."""
        weight, bias = (None if each is None else sum_gradient(each, self.group) for each in (self.weight, self.bias))
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def _check_divides(group: pycomm.Group, length: int, what: str, blocks: int = 1) -> None:
    if length % (group.world_size * blocks):
        raise ConfigError(
            f"tensor parallelism over {group.world_size} ranks cannot cut {length} {what}; expected a multiple of "
            f"{group.world_size * blocks}: choose other sizes, or another number of ranks"
        )
