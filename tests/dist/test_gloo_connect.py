"""gloo's own connecting, where a rank that was here is no more."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import pycomm
from harness import run_ranks
from pycomm import PeerLostError, TransportError
from pycomm.transport import _gloo_group
from pycomm.transport._gloo_group import Meeting, make_group
from pycomm.transport._patience import Patience

REFUSED = "Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection refused"


class Refusing:
    """torch's ProcessGroupGloo where the other rank's address is in the store and its socket gone."""

    _Options = dist.ProcessGroupGloo._Options
    create_device = dist.ProcessGroupGloo.create_device

    def __init__(self, *arguments: object) -> None:
        raise RuntimeError(REFUSED)


def connect_to_the_dead(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    transport: Any = pycomm.get_group().transport
    store = dist.HashStore()
    meeting = Meeting(store, store, rank, 2, Patience(60.0), "127.0.0.1")
    join = partial(make_group, meeting, transport.watch, partial(transport.failed, "init"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gloo_group.dist, "ProcessGroupGloo", Refusing)
        with pytest.raises(PeerLostError, match=r"lost rank 1 \(pid \d+\): killed by SIGKILL") as caught:
            join()
        assert caught.value.rank == 1
        patch.setattr(transport.watch, "look", lambda call: None)
        patch.setattr(transport.watch, "search", lambda call: None)
        with pytest.raises(
            TransportError, match=f"could not connect to the other ranks by gloo; .*{REFUSED}"
        ) as failed:
            join()
        assert not isinstance(failed.value, pycomm.CollectiveTimeoutError)


def test_a_connection_that_is_refused_is_explained_by_who_has_died() -> None:
    run_ranks(2, connect_to_the_dead, transport="torch", casualties=[1], timeout_s=60.0)
