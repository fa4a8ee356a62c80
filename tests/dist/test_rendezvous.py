"""Where ranks meet: the order in which places are tried, and what is said if there is none."""

from __future__ import annotations

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from harness import server
from pycomm import CollectiveTimeoutError, ConfigError, NativeUnavailableError, PeerLostError
from pycomm.collectives import rendezvous
from pycomm.collectives.rendezvous import open_store
from pycomm.launch.ports import free_port
from pycomm.topology import LaunchInfo
from pycomm.transport import Patience
from pycomm.transport._handoff import _HELLO, share_memory
from pycomm.transport._mpi_library import import_mpi

LONE_OF_TWO = LaunchInfo(rank=1, world_size=2, launcher="env", sources=("RANK", "WORLD_SIZE"))
MPI_OF_TWO = LaunchInfo(rank=1, world_size=2, local_rank=1, local_world_size=2, launcher="mpich", sources=("PMI_RANK",))


@pytest.fixture(autouse=True)
def no_stores_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_kept", {})
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back what open_store installs
    monkeypatch.setattr(rendezvous, "_has_hook", False)


def test_keys_carry_the_attempt() -> None:
    base = dist.HashStore()
    open_store(LaunchInfo(world_size=2, attempt=3), 5, store=base).set("key", "new")
    assert base.check(["pycomm/3/key"])
    assert not open_store(LaunchInfo(world_size=2, attempt=4), 5, store=base).check(["key"])


def test_a_world_of_one_needs_no_meeting_point() -> None:
    store = open_store(LaunchInfo(launcher="env", master_addr="unreachable.invalid", master_port=1), 5)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_file_and_its_prefix_are_shared(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    open_store(LaunchInfo(rank=0, world_size=2), 5, init_method=url).set("key", "value")
    assert open_store(LONE_OF_TWO, 5, init_method=url).get("key") == b"value"


def test_rank_0_serves_the_store_and_a_second_init_finds_it() -> None:
    port = free_port()
    launch = LaunchInfo(rank=0, world_size=2, launcher="env", master_addr="127.0.0.1", master_port=port)
    with ThreadPoolExecutor() as pool:  # rank 0 waits until rank 1 has come
        client = pool.submit(dist.TCPStore, "127.0.0.1", port, 2, False, timedelta(seconds=60))
        open_store(launch, 60)
        open_store(launch, 60).set("key", "value")  # the port is not opened twice
        assert client.result().get("pycomm/0/key") == b"value"


def test_rank_0_alone_is_a_timeout() -> None:
    launch = LaunchInfo(rank=0, world_size=2, launcher="env", master_addr="127.0.0.1", master_port=free_port())
    with pytest.raises(CollectiveTimeoutError, match="could not meet the others at tcp://127.0.0.1.* within 0.5 s"):
        open_store(launch, 0.5)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launch = LaunchInfo(rank=0, world_size=2, launcher="env", master_addr="127.0.0.1", master_port=port)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: the port is taken.*MASTER_PORT"):
            open_store(launch, 5)


def listeners(port: int) -> set[str]:
    """The addresses, in the kernel's hex, at which this host listens on ``port``."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and int(line[1].split(":")[1], 16) == port}


def test_the_store_listens_at_the_address_that_was_asked_for_and_no_other() -> None:
    port = free_port()
    launch = LaunchInfo(rank=0, world_size=2, launcher="env", master_addr="127.0.0.1", master_port=port)
    with ThreadPoolExecutor() as pool:
        client = pool.submit(dist.TCPStore, "127.0.0.1", port, 2, False, timedelta(seconds=60))
        open_store(launch, 60)
        assert listeners(port) == {"0100007F"}
        client.result()


def test_an_unreachable_host_is_a_timeout() -> None:
    launch = LaunchInfo(rank=1, world_size=2, launcher="env", master_addr="127.0.0.1", master_port=1)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1 of 2 could not meet .*127\.0\.0\.1:1 within 1 s"):
        open_store(launch, 1)


def test_no_meeting_point_says_what_was_looked_for() -> None:
    with pytest.raises(ConfigError) as info:
        open_store(LONE_OF_TWO, 5)
    for words in ("rank 1 of 2", "launcher: env", "MASTER_ADDR", "init(store=)", "`pycomm run -n 2 script.py`"):
        assert words in str(info.value)


@pytest.mark.parametrize("url", ["nonsense", "tcp://host-without-port", "http://127.0.0.1:80"])
def test_a_wrong_init_method_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="expected tcp://HOST:PORT or file:///PATH"):
        open_store(LONE_OF_TWO, 5, init_method=url)


def test_store_and_init_method_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="got both"):
        open_store(LONE_OF_TWO, 5, init_method="tcp://127.0.0.1:1", store=dist.HashStore())


def test_missing_mpi4py_names_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import_mpi.cache_clear()
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(NativeUnavailableError) as info:
        open_store(MPI_OF_TWO, 5)
    for words in ("rank 1 of 2", "mpich", "mpi4py is not installed", "pip install 'pycomm[mpich]'", "MASTER_ADDR"):
        assert words in str(info.value)


def test_mpi_without_a_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutLibrary:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("cannot load MPI library\nlibmpi.so.40: cannot open shared object file")

    import_mpi.cache_clear()
    monkeypatch.setitem(sys.modules, "mpi4py", WithoutLibrary())  # type: ignore[arg-type]
    with pytest.raises(NativeUnavailableError, match=r"cannot load an MPI library \(cannot load MPI library\)"):
        import_mpi()


# -- the ranks of one host --------------------------------------------------------------------------------------------


def join_all(store: dist.Store, ranks: list[int], timeout_s: float) -> list[BaseException | None]:
    """Returns how ``ranks`` of four fare that come together in one host's memory."""
    with ThreadPoolExecutor() as pool:
        joining = [pool.submit(share_memory, store, "host", rank, 4, Patience(timeout_s)) for rank in ranks]
        return [each.exception() for each in joining]


def test_all_ranks_of_a_host_say_that_one_did_not_come_in_time() -> None:
    errors = join_all(dist.HashStore(), [0, 1], 0.3)
    assert all(isinstance(error, CollectiveTimeoutError) for error in errors), errors


def come_and_die(name: bytes, token: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(name)
        hello = _HELLO.pack(token, 1, 0, b"\1".ljust(128, b"\0"))
        socket.send_fds(connection, [hello], [os.pidfd_open(os.getpid())])
        os._exit(0)


def test_a_rank_that_dies_while_its_host_comes_together_is_named_by_all_at_once() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(join_all, store, [0, 2], 500.0)
        name, _, token = store.get("host/socket").decode().partition(":")
        process = server().Process(target=come_and_die, args=(bytes.fromhex(name), bytes.fromhex(token)))
        process.start()
        errors = joining.result()
        process.join()
    assert all(isinstance(error, PeerLostError) and "local rank 1 of 4" in str(error) for error in errors), errors
