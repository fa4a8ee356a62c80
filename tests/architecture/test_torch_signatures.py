"""What torch.distributed's functions accept, pycomm's of the same name accept in the same places.

So to write ``pycomm.all_reduce`` for ``dist.all_reduce`` is the whole migration. pycomm's own arguments come after
torch's, and by name alone: a later torch may add some of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.collectives.context import parse_op
from pycomm.collectives.message_work import MessageWork

# Names of both that are no functions, and why their signatures are not compared.
NOT_CALLED = {
    "ReduceOp": "operators are its members, and torch's are accepted wherever pycomm's are",
    "Work": "made by the library alone",
}
# Arguments that pycomm accepts in torch's place, though not every value: it has no way to do what the others ask for.
# What is refused is refused in words (tests/conformance/test_arguments.py); defaults never are.
NOT_EVERY_VALUE = {
    ("new_group", "backend"): "a group uses the transport of its parent",
    ("new_group", "device_id"): "over a transport for GPUs only that of the rank; elsewhere it binds nothing",
    ("new_group", "pg_options"): "a group has the settings of its parent",
    ("new_group", "use_local_synchronization"): "the whole parent takes part, also those outside the group",
}
# Arguments that torch takes and pycomm does not, or elsewhere. None so far; each needs its reason here.
MISSING: dict[tuple[str, str], str] = {}

NAMES = sorted(name for name in pycomm.__all__ if callable(getattr(dist, name, None)) and name not in NOT_CALLED)
NEWEST_KNOWN = (2, 13)  # the torch whose arguments these are; an older one lacks some of them

each_name = pytest.mark.parametrize("name", NAMES)


def arguments(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def plain(default: Any) -> Any:
    """Returns a default such that torch's and ours are equal if they mean the same."""
    operators = (pycomm.ReduceOp, dist.ReduceOp, dist.ReduceOp.RedOpType)
    return parse_op(default) if isinstance(default, operators) else default


def test_the_functions_of_both_are_found() -> None:
    assert {"P2POp", "all_reduce", "barrier", "batch_isend_irecv", "irecv", "new_group", "scatter"} <= set(NAMES)
    assert set(NOT_CALLED) <= set(pycomm.__all__)
    for name, argument in NOT_EVERY_VALUE:
        assert argument in inspect.signature(getattr(pycomm, name)).parameters, (name, argument)


@each_name
def test_what_torch_accepts_is_accepted_in_the_same_place(name: str) -> None:
    ours = arguments(getattr(pycomm, name))
    places = {argument.name: place for place, argument in enumerate(ours)}
    for place, theirs in enumerate(arguments(getattr(dist, name))):
        if (name, theirs.name) in MISSING:
            continue
        assert places.get(theirs.name) == place, f"{name}: torch takes {theirs.name} as argument {place}"
        mine = ours[place]
        assert mine.kind == theirs.kind, f"{name}: {theirs.name} is {theirs.kind.description}"
        assert plain(mine.default) == plain(theirs.default), f"{name}: {theirs.name}={theirs.default!r}"


def test_a_handle_does_what_torchs_does() -> None:
    """But for what torch's scripts and NCCL alone have; and messages alone have sources."""
    theirs = {name for name in vars(dist.Work) if not name.startswith("_") and callable(getattr(dist.Work, name))}
    missing = theirs - {"boxed", "unbox", "source_rank", "get_future_result"}
    assert {"get_future", "is_completed", "wait"} <= missing
    assert not {name for name in missing if not callable(getattr(pycomm.Work, name, None))}
    assert callable(MessageWork.source_rank)


@each_name
def test_arguments_of_our_own_are_keyword_only(name: str) -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < NEWEST_KNOWN:
        pytest.skip(f"torch {torch.__version__} lacks arguments that later ones have")
    known = {argument.name for argument in arguments(getattr(dist, name))}
    for argument in arguments(getattr(pycomm, name)):
        if argument.name not in known:
            assert argument.kind in (argument.KEYWORD_ONLY, argument.VAR_KEYWORD), f"{name}: {argument}"
