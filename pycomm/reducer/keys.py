"""By which name compressors keep the state of a parameter: one of its own in each group, the same in every run.

State goes on under a parameter's name, whatever bucket it is in and in a checkpoint. But several engines of a group may
have parameters of one name: those of two critics, or of a generator and a discriminator. What is owed to one must not
be delivered to the other.
"""

from __future__ import annotations

import itertools
import weakref

from torch import nn

import pycomm

__all__ = ["key_of"]

_Holders = dict[str, weakref.ref[nn.Parameter]]
_holders: weakref.WeakKeyDictionary[pycomm.Group, _Holders] = weakref.WeakKeyDictionary()


def key_of(group: pycomm.Group, name: str, parameter: nn.Parameter) -> str:
    """Returns ``name`` for the first parameter of that name in ``group``, ``"2:name"`` for the second, and so on.

    A parameter that is wrapped again keeps its key; nobody gets that of one that is gone. All ranks make their engines
    in the same order, so they agree.
    """
    holders = _holders.setdefault(group, {})
    keys = itertools.chain([name], (f"{number}:{name}" for number in itertools.count(2)))
    return next(key for key in keys if holders.setdefault(key, weakref.ref(parameter))() is parameter)
