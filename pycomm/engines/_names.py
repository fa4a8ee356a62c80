"""A wrapper's checkpoint has the wrapped module's own names."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["keep_names"]

_WRAPPED = "module."


def keep_names(wrapper: nn.Module) -> None:
    """Lets the state dict of ``wrapper`` name things as its child ``module`` does, and takes such a one."""
    wrapper.register_state_dict_post_hook(_without_wrapper)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_pre_hook(_with_wrapper)  # type: ignore[no-untyped-call]


def _without_wrapper(_module: nn.Module, state: dict[str, Any], prefix: str, _local: Any) -> None:
    for name in [name for name in state if name.startswith(prefix + _WRAPPED)]:
        state[prefix + name.removeprefix(prefix + _WRAPPED)] = state.pop(name)


def _with_wrapper(_module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        state[prefix + _WRAPPED + name.removeprefix(prefix)] = state.pop(name)
