"""What a run of autograd's engine is for: ``backward()``, or ``autograd.grad`` of a few tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Edges", "accumulates"]

Edges = Sequence[tuple[Any, int]]  # ``next_functions`` of a node


def accumulates(edges: Edges) -> bool:
    """Says whether the run that is under way accumulates into the leaves behind ``edges``, as ``backward()`` does.

    Called in a hook of a node that the run executes; ``edges`` are that node's. A run of ``autograd.grad`` executes
    only what leads to its inputs, and no leaf: so one leaf tells.
    """
    leaf, following = None, _first(edges)
    while following is not None:
        leaf, following = following, _first(following.next_functions)
    try:
        return leaf is None or torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch's answer where the leaf is itself an input of autograd.grad
        return False


def _first(edges: Edges) -> Any:
    return next((node for node, _ in edges if node is not None), None)
