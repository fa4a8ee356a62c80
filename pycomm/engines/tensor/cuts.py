"""What layers whose parameters are cut have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

import pycomm

from ...errors import ConfigError
from .._agreement import check_same_model
from .._marks import Cut, mark_cut
from .functions import own_part

__all__ = ["CutLayer"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class CutLayer(nn.Module):
    """A layer of whose parameters some, ``_dims`` by name, are cut over ``group``, also those it is given later."""

    _dims: ClassVar[Mapping[str, int]]
    group: pycomm.Group
    blocks: int = 1

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Also says on ``param`` how it is cut."""
        super().register_parameter(name, param)
        if param is not None and name in self._dims:
            mark_cut(param, Cut(self._dims[name], self.blocks, self.group.ranks))

    def _take_part(self, name: str, whole: torch.Tensor | None) -> None:
        """Makes this rank's part of ``whole``, or a copy where it is not cut, its parameter ``name``."""
        if whole is None:
            self.register_parameter(name, None)
            return
        dim = self._dims.get(name)
        if dim is None:
            values = whole.detach().clone()
        else:
            blocks = whole.detach().chunk(self.blocks, dim)
            values = torch.cat([own_part(block, self.group, dim) for block in blocks], dim)
        self.register_parameter(name, nn.Parameter(values, requires_grad=whole.requires_grad))

    def _check_replaces(self, layer: nn.Module, expected: type[nn.Module]) -> None:
        """Raises on every rank unless all have the same ``layer``: parts of different ones may fit, and mean nothing.

        And unless it is an ``expected`` and no more: what it does beside that would be lost.
        """
        here = type(self).__name__
        check_same_model(list(layer.named_parameters()), self.group, here)
        if type(layer) is not expected:
            raise ConfigError(
                f"{here}: expected nn.{expected.__name__} itself, got a {type(layer).__name__}; what a subclass or a "
                f"parametrization computes would be lost: cut a plain layer, or leave this one whole"
            )
        own = [*(name for name in _HOOKS if getattr(layer, name)), *({"forward"} & vars(layer).keys())]
        if own:
            raise ConfigError(
                f"{here}: expected a plain nn.{expected.__name__}, got one with {', '.join(own)}, which would be lost; "
                f"register hooks on the layer that replaces it, or leave this one whole"
            )
