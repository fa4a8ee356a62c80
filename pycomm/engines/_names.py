"""A wrapper's checkpoint has the wrapped module's own names."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

__all__ = ["keep_names"]

_WRAPPED = "module."
_LOADING = "_pycomm_loading"  # of a wrapper that is being loaded


class _Loading(NamedTuple):
    prefix: str
    versions: dict[str, Any]
    added: set[str]  # to the versions, for as long as it takes


def keep_names(wrapper: nn.Module) -> None:
    """Lets the state dict of ``wrapper`` name things as its child ``module`` does, and takes such a one."""
    wrapper.register_state_dict_post_hook(_without_wrapper)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_pre_hook(_with_wrapper)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_post_hook(_tell_names)  # type: ignore[no-untyped-call]


def _without_wrapper(_module: nn.Module, state: dict[str, Any], prefix: str, _local: Any) -> None:
    _rename(state, prefix + _WRAPPED, prefix)
    versions = getattr(state, "_metadata", {})  # of modules; those by the wrapper's names it takes itself
    inner = (prefix + _WRAPPED).removesuffix(".")
    found = {name: each for name, each in versions.items() if name == inner or name.startswith(inner + ".")}
    versions.update({(prefix + name[len(inner) + 1 :]).removesuffix("."): each for name, each in found.items()})


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    """Gives the entries whose names begin with ``old`` names that begin with ``new`` instead; all at once, as the new
    name of one may be the old one of another.
    """
    renamed = {name: state.pop(name) for name in list(state) if name.startswith(old)}
    state.update({new + name.removeprefix(old): value for name, value in renamed.items()})


def _with_wrapper(module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    _rename(state, prefix, prefix + _WRAPPED)
    versions = getattr(state, "_metadata", {})  # the caller's own, where torch looks for those of the children
    inner = {(prefix + _WRAPPED + name.removeprefix(prefix)).removesuffix("."): each for name, each in versions.items()}
    added = inner.keys() - versions.keys()
    versions.update({name: inner[name] for name in added})
    vars(module)[_LOADING] = _Loading(prefix, versions, added)


def _tell_names(module: nn.Module, incompatible: Any) -> None:
    """Names what is missing, or not expected, as the caller does."""
    prefix, versions, added = vars(module).pop(_LOADING)
    for name in added:
        del versions[name]
    for names in incompatible:
        names[:] = [
            prefix + name.removeprefix(prefix + _WRAPPED) if name.startswith(prefix + _WRAPPED) else name
            for name in names
        ]
