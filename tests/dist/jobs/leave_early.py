"""Run by every rank of test_two_hosts.py over a slow cable: the second host sends what takes a second, and is gone.

One rank of the first then waits for more, in vain. That breaks the group for all, so it does when all have theirs.
"""

from __future__ import annotations

import torch

import pycomm

NUMEL = 1 << 18  # 0.84 s at 10 Mbit/s

if __name__ == "__main__":
    pycomm.init(timeout=100)
    rank, half = pycomm.rank(), pycomm.world_size() // 2
    sent = torch.arange(NUMEL, dtype=torch.float32)
    if rank >= half:
        pycomm.send(sent, rank - half, tag=3)
    else:
        received = torch.empty(NUMEL)
        pycomm.recv(received, rank + half, tag=3)
        assert torch.equal(received, sent)
        if rank < half - 1:
            pycomm.send(torch.ones(1), half - 1, tag=4)
        else:
            for other in range(half - 1):
                pycomm.recv(torch.empty(1), other, tag=4)
            try:
                pycomm.recv(received, rank + half, tag=3)
            except pycomm.PeerLostError as error:
                assert f"rank {rank + half} " in str(error) and "has closed the group" in str(error), error
            else:
                raise AssertionError("there was no second message")
    pycomm.finalize()
    print("{}")
