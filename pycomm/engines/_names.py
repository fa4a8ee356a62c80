"""A wrapper's checkpoint has the wrapped module's own names."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["keep_names"]

_WRAPPED = "module."
_PREFIX = "_pycomm_prefix"  # of a wrapper that is being loaded


def keep_names(wrapper: nn.Module) -> None:
    """Lets the state dict of ``wrapper`` name things as its child ``module`` does, and takes such a one."""
    wrapper.register_state_dict_post_hook(_without_wrapper)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_pre_hook(_with_wrapper)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_post_hook(_tell_names)  # type: ignore[no-untyped-call]


def _without_wrapper(_module: nn.Module, state: dict[str, Any], prefix: str, _local: Any) -> None:
    for name in [name for name in state if name.startswith(prefix + _WRAPPED)]:
        state[prefix + name.removeprefix(prefix + _WRAPPED)] = state.pop(name)


def _with_wrapper(module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        state[prefix + _WRAPPED + name.removeprefix(prefix)] = state.pop(name)
    vars(module)[_PREFIX] = prefix


def _tell_names(module: nn.Module, incompatible: Any) -> None:
    """Names what is missing, or not expected, as the caller does."""
    prefix = vars(module).pop(_PREFIX)
    for names in incompatible:
        names[:] = [
            prefix + name.removeprefix(prefix + _WRAPPED) if name.startswith(prefix + _WRAPPED) else name
            for name in names
        ]
