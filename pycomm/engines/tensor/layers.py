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
from .functions import copy_to_ranks, gather_dim, gather_same, own_part, scatter_sum, sum_gradient, sum_over_ranks

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "SequenceParallelLayerNorm", "VocabParallelEmbedding"]

_SEQUENCE = 1


class ColumnParallelLinear(nn.Module):
    """``nn.Linear`` cut along its outputs: ``(..., in)`` to this rank's ``(..., out / world_size)``.

    ``blocks`` > 1: the outputs are so many things side by side, such as q, k and v, and each is cut.
    ``gathers_output`` gives the whole output on every rank instead. Raises ConfigError if the ranks do not divide it.
    """

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
        self.group = pycomm.get_group(group)
        self.gathers_output, self.is_sequence_parallel = gathers_output, is_sequence_parallel
        self._take(nn.Linear(in_features, out_features, bias), blocks)

    @classmethod
    def of(cls, linear: nn.Linear, group: Any = None, **options: Any) -> ColumnParallelLinear:
        """Returns this rank's part of ``linear``."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.group = pycomm.get_group(group)
        layer.gathers_output = options.get("gathers_output", False)
        layer.is_sequence_parallel = options.get("is_sequence_parallel", False)
        layer._take(linear, options.get("blocks", 1))
        return layer

    def _take(self, linear: nn.Linear, blocks: int) -> None:
        _check_same(self.group, linear, type(self).__name__)
        _check_divides(self.group, linear.out_features, f"{blocks} x heads or outputs", blocks)

        def part(whole: torch.Tensor) -> nn.Parameter:
            cut = [own_part(block, self.group, 0) for block in whole.detach().chunk(blocks)]
            return nn.Parameter(torch.cat(cut), requires_grad=whole.requires_grad)

        self.weight = part(linear.weight)
        self.bias = None if linear.bias is None else part(linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x (..., in)``, the same on all ranks (or cut along the sequence), to ``(..., out / world_size)``."""
        x = gather_dim(x, self.group, _SEQUENCE) if self.is_sequence_parallel else copy_to_ranks(x, self.group)
        output = functional.linear(x, self.weight, self.bias)
        return gather_same(output, self.group, -1) if self.gathers_output else output


class RowParallelLinear(nn.Module):
    """``nn.Linear`` cut along its inputs: this rank's ``(..., in / world_size)`` to the whole ``(..., out)``.

    The bias is whole on every rank and added once. With ``is_sequence_parallel`` the output is cut along the sequence.
    """

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
        self.group = pycomm.get_group(group)
        self.is_sequence_parallel = is_sequence_parallel
        self._take(nn.Linear(in_features, out_features, bias))

    @classmethod
    def of(cls, linear: nn.Linear, group: Any = None, **options: Any) -> RowParallelLinear:
        """Returns this rank's part of ``linear``."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.group = pycomm.get_group(group)
        layer.is_sequence_parallel = options.get("is_sequence_parallel", False)
        layer._take(linear)
        return layer

    def _take(self, linear: nn.Linear) -> None:
        _check_same(self.group, linear, type(self).__name__)
        _check_divides(self.group, linear.in_features, "inputs")
        weight = own_part(linear.weight.detach(), self.group, 1)
        self.weight = nn.Parameter(weight.clone(), requires_grad=linear.weight.requires_grad)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's ``x (..., in / world_size)`` to ``(..., out)``, the same on all ranks."""
        partial = functional.linear(x, self.weight)
        if not self.is_sequence_parallel:
            total = sum_over_ranks(partial, self.group)
            return total if self.bias is None else total + self.bias
        total = scatter_sum(partial, self.group, _SEQUENCE)
        return total if self.bias is None else total + sum_gradient(self.bias, self.group)


class VocabParallelEmbedding(nn.Module):
    """``nn.Embedding`` cut along the vocabulary: ``tokens (...)`` to ``(..., width)`` on every rank."""

    def __init__(self, num_embeddings: int, embedding_dim: int, group: Any = None) -> None:
        super().__init__()
        self.group = pycomm.get_group(group)
        self._take(nn.Embedding(num_embeddings, embedding_dim))

    @classmethod
    def of(cls, embedding: nn.Embedding, group: Any = None) -> VocabParallelEmbedding:
        """Returns this rank's part of ``embedding``."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.group = pycomm.get_group(group)
        layer._take(embedding)
        return layer

    def _take(self, embedding: nn.Embedding) -> None:
        _check_same(self.group, embedding, type(self).__name__)
        if embedding.padding_idx is not None or embedding.max_norm is not None:
            raise ConfigError("VocabParallelEmbedding: padding_idx and max_norm cannot be cut; expected None for both")
        _check_divides(self.group, embedding.num_embeddings, "entries of the vocabulary")
        self.weight = nn.Parameter(own_part(embedding.weight.detach(), self.group, 0).clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """A rank looks up the tokens that it has; the others' count as zeros."""
        local = tokens - self.group.rank * len(self.weight)
        is_here = (local >= 0) & (local < len(self.weight))
        found = functional.embedding(local.where(is_here, 0), self.weight)
        return sum_over_ranks(found * is_here.unsqueeze(-1).to(found.dtype), self.group)


class SequenceParallelLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` over activations that are cut along the sequence; its parameters are whole on every rank."""

    def __init__(self, normalized_shape: Any, group: Any = None, **options: Any) -> None:
        super().__init__(normalized_shape, **options)
        self.group = pycomm.get_group(group)
        _check_same(self.group, self, type(self).__name__)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x (batch, length / world_size, width)`` to the same shape."""
        weight, bias = (None if each is None else sum_gradient(each, self.group) for each in (self.weight, self.bias))
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def _check_same(group: pycomm.Group, whole: nn.Module, what: str) -> None:
    """Raises on every rank unless all cut the same layer: parts of different ones may fit together and mean nothing."""
    check_same_model(list(whole.named_parameters()), group, what)


def _check_divides(group: pycomm.Group, length: int, what: str, blocks: int = 1) -> None:
    if length % (group.world_size * blocks):
        raise ConfigError(
            f"tensor parallelism over {group.world_size} ranks cannot cut {length} {what}; expected a multiple of "
            f"{group.world_size * blocks}: choose other sizes, or another number of ranks"
        )
