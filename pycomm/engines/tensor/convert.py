"""Makes an ordinary module parallel: replaces the layers that a plan names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

import pycomm

from ...errors import ConfigError
from .layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

__all__ = ["parallelize"]

_KINDS: dict[str, tuple[type[nn.Module], Callable[..., nn.Module]]] = {
    "column": (nn.Linear, ColumnParallelLinear.of),
    "column, gathered": (nn.Linear, partial(ColumnParallelLinear.of, gathers_output=True)),
    "qkv": (nn.Linear, partial(ColumnParallelLinear.of, blocks=3)),
    "row": (nn.Linear, RowParallelLinear.of),
    "vocabulary": (nn.Embedding, VocabParallelEmbedding.of),
}


def parallelize(module: nn.Module, plan: Mapping[str, str], group: Any = None) -> nn.Module:
    """Replaces layers of ``module``, in place, by this rank's parts of them; returns the module.

    ``plan`` says for patterns of names what they become: ``{"blocks.*.up": "column", "blocks.*.down": "row"}``; also
    "column, gathered", "qkv" (three cuts side by side) and "vocabulary". Every rank has the same module. Raises
    ConfigError for a pattern that names nothing, and for a layer that cannot be cut.
    """
    found = pycomm.get_group(group)
    names = dict(module.named_modules())
    for pattern, kind in plan.items():
        if kind not in _KINDS:
            raise ConfigError(f"parallelize: {pattern!r}: expected one of {', '.join(_KINDS)}, got {kind!r}")
        chosen = [name for name in names if fnmatchcase(name, pattern)]
        if not chosen:
            raise ConfigError(f"parallelize: {pattern!r} names no module; there are {', '.join(list(names)[1:9])}, ...")
        expected, make = _KINDS[kind]
        for name in chosen:
            layer = names[name]
            if not isinstance(layer, expected):
                raise ConfigError(
                    f"parallelize: {name!r} is a {type(layer).__name__}; {kind!r} expects a {expected.__name__}"
                )
            parent, _, child = name.rpartition(".")
            setattr(names[parent], child, make(layer, found))
    return module
