"""Starting and ending."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import torch.distributed as dist

import pycomm
from harness import run_forked, run_ranks, transport_params
from pycomm import CollectiveMismatchError, CollectiveTimeoutError, Config, ConfigError, PeerLostError, TransportError
from pycomm.algorithms.selection import load_table
from pycomm.algorithms.tables import Table
from pycomm.collectives import init
from pycomm.collectives.exchange import exchange_hosts
from pycomm.transport import Patience
from pycomm.transport.local import LocalWorld
from warm_python import warm_python

RANKS = 4  # on hosts: two each
TABLE = load_table("")
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_PROCID",
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def test_a_plain_python_is_a_world_of_one() -> None:
    assert not pycomm.is_initialized()
    with pycomm.init() as group:
        assert pycomm.is_initialized()
        assert (pycomm.rank(), pycomm.world_size(), pycomm.local_rank(), group.ranks) == (0, 1, 0, (0,))
        tensor = torch.arange(3.0)
        pycomm.all_reduce(tensor)
        assert tensor.tolist() == [0.0, 1.0, 2.0]
        assert pycomm.all_reduce_mean(tensor, async_op=True).wait()  # type: ignore[union-attr]
        pycomm.barrier()
        with pytest.raises(ConfigError, match="already initialized"):
            pycomm.init()
    assert not pycomm.is_initialized()
    with pytest.raises(TransportError, match="closed"):
        pycomm.all_reduce(tensor, group=group)
    with pytest.raises(ConfigError, match=r"call pycomm.init\(\)"):
        pycomm.all_reduce(tensor)


def test_init_again_after_finalize() -> None:
    for _ in range(3):
        pycomm.init("local")
        pycomm.finalize()
        pycomm.finalize()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"transport": "carrier-pigeon"}, "unknown transport 'carrier-pigeon'; known: .*local"),
        ({"rank": 0}, "together or neither"),
        ({"timeout": -1}, "more than 0 seconds"),
        (
            {"transport": "local", "rank": 0, "world_size": 2, "store": dist.HashStore(), "timeout": 0.05},
            "ranks .1. did not",
        ),
    ],
)
def test_what_cannot_start(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(pycomm.PycommError, match=message):
        pycomm.init(**arguments)  # type: ignore[arg-type]
    assert not pycomm.is_initialized()


def test_transport_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_TRANSPORT", "local")
    with pycomm.init() as group:
        assert group.transport.name == "local"
    monkeypatch.setenv("PYCOMM_TRANSPORT", "pigeon")
    with pytest.raises(ConfigError, match="unknown transport 'pigeon'"):
        pycomm.init()


def errors_of_ranks_that_meet(*asking: tuple[str, Table]) -> list[CollectiveMismatchError]:
    store = dist.HashStore()
    errors: list[CollectiveMismatchError] = []

    def join(rank: int, transport: str, table: Table) -> None:
        try:
            exchange_hosts(store, rank, len(asking), transport, table, Patience(60.0))
        except CollectiveMismatchError as error:
            errors.append(error)

    threads = [threading.Thread(target=join, args=(rank, *each)) for rank, each in enumerate(asking)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    return errors


def test_ranks_that_differ_are_told() -> None:
    errors = errors_of_ranks_that_meet(("shm", TABLE), ("torch", TABLE))
    assert len(errors) == 2
    for error in errors:
        assert "differ in transport: rank 0: 'shm', rank 1: 'torch'" in str(error)


def test_ranks_with_different_tables_are_told() -> None:
    other = load_table("all_reduce * * * 1MiB- direct")
    errors = errors_of_ranks_that_meet(("shm", TABLE), ("shm", TABLE), ("shm", other))
    assert len(errors) == 3
    for error in errors:
        assert "different tables of algorithms" in str(error) and "ranks [2] differ" in str(error)


def test_the_missing_rank_is_named() -> None:
    with pytest.raises(CollectiveTimeoutError, match=r"ranks \[1, 2\] did not come within 0.05 s"):
        exchange_hosts(dist.HashStore(), 0, 3, "auto", TABLE, Patience(0.05))


def test_threads_have_groups_of_their_own() -> None:
    world = LocalWorld(1)
    with pycomm.init(world.transports[0]):
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(pycomm.is_initialized()))
        thread.start()
        thread.join()
        assert seen == [False] and pycomm.is_initialized()


def test_a_group_that_is_dropped_ends_its_thread() -> None:
    with pycomm.init("local"):
        group = pycomm.new_group(name="dropped")
        assert pycomm.barrier(group, async_op=True).wait()  # type: ignore[union-attr]
        (thread,) = (each for each in threading.enumerate() if each.name == "pycomm-dropped")
        del group
        gc.collect()
        thread.join(500)
        assert not thread.is_alive()


def test_closing_a_group_closes_those_made_from_it() -> None:
    with pycomm.init("local"):
        outer = pycomm.new_group()
        assert isinstance(outer, pycomm.Group)
        inner = pycomm.split(0, group=outer)
        assert isinstance(inner, pycomm.Group)
        outer.close()
        with pytest.raises(TransportError, match="closed"):
            pycomm.barrier(inner)
        pycomm.barrier()


def test_a_fork_is_no_rank() -> None:
    with pycomm.init():

        def body() -> None:
            assert not pycomm.is_initialized()

        run_forked(body)
        assert pycomm.is_initialized()
        pycomm.all_reduce(torch.ones(2))  # the child took nothing with it


def test_it_says_what_it_found_when_asked() -> None:
    code = "import pycomm; pycomm.init('local'); print(pycomm.world_size())"
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    for level, expected in (("info", ["launcher none: rank 0 of 1", "joined by transport local"]), ("", [])):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**clean, "PYCOMM_LOG": level},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert result.stdout == "1\n", result.stderr
        assert bool(result.stderr) == bool(expected), result.stderr
        assert all(text in result.stderr for text in expected), result.stderr


def test_joins_an_initialized_torch_distributed() -> None:
    code = (
        "import os, sys, torch, torch.distributed as dist, pycomm\n"
        "rank, port = int(sys.argv[1]), int(sys.argv[2])\n"
        "store = dist.TCPStore('127.0.0.1', port, is_master=False)\n"
        "dist.init_process_group('gloo', store=store, rank=rank, world_size=2)\n"
        "t = torch.ones(4)\n"
        "pycomm.all_reduce(t)\n"
        "assert (t == 2).all() and pycomm.is_initialized()\n"
        "group = dist.new_group([0, 1])\n"
        "pycomm.all_reduce(t, group=group)\n"
        "assert (t == 4).all() and pycomm.rank(group) == rank\n"
        "pycomm.broadcast(t.fill_(rank), src=1, group=dist.group.WORLD)\n"
        "assert (t == 1).all()\n"
        "held = []\n"
        "for _ in range(4):\n"
        "    held.append((len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task'))))\n"
        "    group = dist.new_group()\n"
        "    pycomm.all_reduce(t, group=group)\n"
        "    dist.destroy_process_group(group)\n"
        "    del group\n"
        "assert held[3] <= held[2], f'of groups that were destroyed something is kept: {held}'\n"
        "t.fill_(1)\n"
        "pycomm.finalize()\n"
        "dist.all_reduce(t)\n"
        "assert (t == 2).all()\n"
        "dist.destroy_process_group()\n"
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen([warm_python(), "-c", code, str(rank), str(store.port)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=900)
        assert process.returncode == 0, errors


def what_ranks_see(rank: int) -> tuple[int, int, int]:
    return pycomm.rank(), pycomm.world_size(), pycomm.local_rank()


def test_ranks_by_argument() -> None:
    assert run_ranks(3, what_ranks_see, transport="torch") == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]


def test_a_world_that_was_left_is_not_kept() -> None:
    """Its descriptors and memory go with it, whoever tells the others at exit that this process has left."""
    group = pycomm.init("torch", rank=0, world_size=1, store=dist.HashStore())
    transport = weakref.ref(group.transport)
    pycomm.finalize()
    del group
    gc.collect()
    assert transport() is None


def send_or_receive(t: torch.Tensor, rank: int, group: pycomm.Group, from_any: bool = False) -> None:
    """From rank 0, to a rank of its host and one of another."""
    if rank == 0:
        pycomm.send(t, 1, group=group)
        pycomm.send(t, 2, group=group)
    elif rank < 3:
        pycomm.recv(t, None if from_any else 0, group=group)


def what_stays_of_closed_groups(rank: int) -> list[str]:
    """Returns the calls after which a closed group's transport is still there, though nobody has it."""
    t = torch.ones(3000)
    calls = {
        "none": lambda group: None,
        "a small call": lambda group: pycomm.all_reduce(torch.ones(3), group=group),
        "a plan": lambda group: pycomm.all_reduce(t, group=group, algorithm="ring"),
        "an asynchronous call": lambda group: pycomm.all_reduce(t, group=group, async_op=True).wait(),
        "a message": lambda group: send_or_receive(t, rank, group),
        "a message from any": lambda group: send_or_receive(t, rank, group, from_any=True),
        "a barrier": lambda group: pycomm.barrier(group=group),
    }
    found = []
    gc.collect()
    gc.disable()
    for name, call in calls.items():
        group = pycomm.new_group(range(RANKS))
        transport = weakref.ref(group.transport)
        call(group)
        group.close()
        del group
        for thread in threading.enumerate():
            if thread.name == "pycomm-arrivals":  # which hears that the group is closed
                thread.join()
        if transport() is not None:
            found.append(name)
    gc.enable()
    return found


@pytest.mark.parametrize("transport", [param for param in transport_params() if param.values[0] != "local"])
def test_a_closed_group_goes_with_its_last_reference(transport: str) -> None:
    """Its descriptors and memory do not wait for the collector of cycles (the ranks of a local one have each other)."""
    assert run_ranks(RANKS, what_stays_of_closed_groups, transport=transport) == [[]] * RANKS


def test_the_device_of_a_new_group_is_that_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the transport has one GPU a rank. What passes comes to the next mistake."""
    with pycomm.init() as group:
        monkeypatch.setattr(type(group.transport), "devices", frozenset({"cuda"}))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        for refused in ("cuda:0", "cpu"):
            with pytest.raises(ConfigError, match=f"expected cuda:1 or None, got {refused}"):
                pycomm.new_group([0, 0], device_id=torch.device(refused))
        for taken in ("cuda:1", "cuda"):
            with pytest.raises(ConfigError, match="none twice"):
                pycomm.new_group([0, 0], device_id=torch.device(taken))
        monkeypatch.undo()


@pytest.mark.parametrize(("lost", "globally"), [(0, 3), (-1, -1)])
def test_who_is_lost_while_a_group_of_others_joins_has_its_rank_in_the_job(
    monkeypatch: pytest.MonkeyPatch, lost: int, globally: int
) -> None:
    def lose(*_: object) -> None:
        raise PeerLostError("lost", lost)

    monkeypatch.setattr(init, "_connect", lose)
    with pytest.raises(PeerLostError) as caught:
        init.connect_group(dist.HashStore(), 0, 1, Config(), "pair", [3])
    assert (caught.value.rank, caught.value.global_rank) == (lost, globally)
