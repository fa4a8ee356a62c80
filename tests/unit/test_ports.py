"""The free port that the launcher gives to a job (``launch/ports.py``)."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pycomm.launch import ports
from pycomm.launch.ports import free_port


def test_it_is_none_that_the_kernel_gives_to_others() -> None:
    first, last = (int(number) for number in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    drawn = [free_port() for _ in range(100)]
    assert all(20_000 <= port < first or last < port <= 65_535 for port in drawn)
    assert len(set(drawn)) > 90


def test_one_that_was_asked_for_must_be_free_at_every_address() -> None:
    port = free_port()
    assert free_port(port) == port
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            free_port(port)


def test_those_that_are_taken_are_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels, taken = tmp_path / "range", free_port()
    monkeypatch.setattr(ports, "_KERNELS", kernels)
    monkeypatch.setattr(ports, "_FIRST", taken)
    kernels.write_text(f"{taken + 2}\t65535\n")  # so two are left to choose from
    with socket.socket() as other:
        other.bind(("127.0.0.2", taken))
        other.listen()
        assert {free_port() for _ in range(20)} == {taken + 1}
    kernels.write_text("1024\t65535\n")  # and here none: it is one of the kernel's own
    assert free_port() >= 1024
