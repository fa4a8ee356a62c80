"""A job whose ranks are killed, stopped and started again at random, and which has to get on with its work.

    python tests/faults/soak.py --minutes 120 --seed 4711 --transport torch

Every step is an all_reduce of a random size whose sum is checked; the sum of the sums is the job's state, which a rank
that was started again copies from another. At the end the state must be what an undisturbed job would have: no step
lost, none done twice. One rank that has the state is always left alive, since a state that nobody holds any more is
lost with whatever library. After a few strikes in a row the supervisor waits for a step, since on a busy machine
coming together again may take longer than the time between two strikes. The run stops where 30 s (``--stuck``) pass
without a strike and without a finished step, and shows every rank's stack.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from pycomm.fault import Generation, Membership

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import pretend_hosts, server

RANKS = 8
PAUSE_S = 0.01  # at most, between two steps of a rank: so some wait in a collective when they are struck, some do not
MOST_IN_A_ROW = 8  # moments of strikes without a finished step between them
_SIZES = (1, 5, 1000, 4099, 70_001, 300_007)
_FIELDS = 3  # of a rank in the board: last finished step, generation, descriptors held


def contribution(rank: int, step: int, numel: int) -> torch.Tensor:
    """What a rank adds at a step: integers that differ between ranks, steps and elements."""
    return pattern(numel) + rank * step


@cache
def pattern(numel: int) -> torch.Tensor:
    return torch.arange(numel) % 97


def expected_sum(step: int, numel: int) -> torch.Tensor:
    return torch.add(step * (RANKS * (RANKS - 1) // 2), pattern(numel), alpha=RANKS)


def numel_of(step: int) -> int:
    return random.Random(step).choice(_SIZES)


def state_after(steps: int) -> int:
    """The state of an undisturbed job."""
    return sum(step * (RANKS * (RANKS - 1) // 2) for step in range(1, steps + 1))


# -- a rank ------------------------------------------------------------------------------------------------------------


def rank_main(rank: int, port: int, board: Any, last_step: Any, dump: str, transport: str) -> None:
    """Works until ``last_step`` is set and reached; ends with exit code 0, or 1 after printing what is wrong."""
    dump_file = open(dump, "w")  # noqa: SIM115  faulthandler needs it for as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=dump_file, all_threads=True)
    torch.set_num_threads(1)
    if transport == "mixed":
        pretend_hosts(rank)
    member = Membership(rank, RANKS, dist.TCPStore("127.0.0.1", port, is_master=False), transport=transport)
    state, step = torch.zeros(1, dtype=torch.int64), 0
    generation: Generation | None = None
    pauses = random.Random(rank)  # ranks are forked, and would all have one sequence
    while last_step.value == 0 or step < last_step.value:
        try:
            if generation is None:
                generation = member.join(step)
                pycomm.broadcast(state, generation.source)
                step = generation.step
                board[_FIELDS * rank + 1] = generation.number
                board[_FIELDS * rank + 2] = len(os.listdir("/proc/self/fd"))
            step = work(rank, step, state)
            board[_FIELDS * rank] = step
            time.sleep(pauses.uniform(0.0, PAUSE_S))  # else eight ranks take all cores from the tests beside them
        except pycomm.TransportError:
            generation = None
    assert state.item() == state_after(step), f"rank {rank}: state {state.item()} after step {step}"
    leave(step)


def work(rank: int, step: int, state: torch.Tensor) -> int:
    """Does the next step; returns its number."""
    step += 1
    numel = numel_of(step)
    tensor = contribution(rank, step, numel)
    pycomm.all_reduce(tensor)
    if not torch.equal(tensor, expected_sum(step, numel)):
        print(f"rank {rank}: a wrong sum at step {step}, without an error", flush=True)
        os._exit(1)
    state += tensor[0]
    return step


def leave(step: int) -> None:
    """Ends together with the others, which may still have a step to do."""
    with contextlib.suppress(pycomm.TransportError):
        pycomm.barrier()
    pycomm.finalize()


# -- the supervisor ----------------------------------------------------------------------------------------------------


class Soak:
    """Starts the ranks, strikes them, starts them again; see the top of this file."""

    def __init__(self, seed: int, folder: str, stuck_s: float, transport: str) -> None:
        self.random = random.Random(seed)
        self.stuck_s = stuck_s
        self.transport = transport
        self.folder = Path(folder)
        self.context = server()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.board = self.context.RawArray("q", _FIELDS * RANKS)
        self.last_step = self.context.RawValue("q", 0)
        self.processes: list[Any] = [self.start(rank) for rank in range(RANKS)]
        self.back_at = [0.0] * RANKS  # when a dead rank is started again
        self.wake_at = [0.0] * RANKS
        self.strikes = {"kill": 0, "stop": 0, "start": 0}
        self.longest_s = {"without a step": 0.0, "without a step or a strike": 0.0}

    def start(self, rank: int) -> Any:
        dump = str(self.folder / f"stack{rank}")
        arguments = rank, self.store.port, self.board, self.last_step, dump, self.transport
        process = self.context.Process(target=rank_main, args=arguments, name=f"rank {rank}")
        process.start()
        return process

    def run(self, duration_s: float) -> dict[str, float]:
        """Returns what was done. Raises AssertionError if the job hangs, is wrong or leaks."""
        try:
            self._disturb(duration_s)
            self._end()
        finally:
            for process in self.processes:
                process.kill()
                process.join()
        steps, generations = self.board[0], max(self.board[1::_FIELDS])
        descriptors = self.board[2::_FIELDS]
        assert max(descriptors) < min(descriptors) + 16, f"descriptors of the ranks: {list(descriptors)}"
        longest = {f"longest {what}, s": round(longest_s, 2) for what, longest_s in self.longest_s.items()}
        return {"steps": steps, "generations": generations, **self.strikes, **longest}

    def _disturb(self, duration_s: float) -> None:
        end, next_strike = time.monotonic() + duration_s, time.monotonic() + 1.0
        finished, in_a_row = 0, 0
        done_at = calm_since = time.monotonic()
        while (now := time.monotonic()) < end:
            time.sleep(0.01)
            self._revive(now)
            if now > next_strike and in_a_row < MOST_IN_A_ROW:
                next_strike = now + self.random.uniform(0.05, 1.0)
                self._strike(now)
                calm_since, in_a_row = now, in_a_row + 1
            if max(self.board[::_FIELDS]) > finished:
                finished, in_a_row = max(self.board[::_FIELDS]), 0
                done_at = calm_since = now
            for what, since in zip(self.longest_s, (done_at, calm_since), strict=True):
                self.longest_s[what] = max(self.longest_s[what], now - since)
            assert now - calm_since < self.stuck_s, f"no step after {finished} for {self.stuck_s} s\n{self._stacks()}"

    def _strike(self, now: float) -> None:
        how = self.random.choice(("kill", "kill", "stop"))
        for rank in self.random.sample(range(RANKS), self.random.choice((1, 1, 1, 2, 3))):
            process = self.processes[rank]
            if self.wake_at[rank] or not process.is_alive():
                continue
            if how == "kill" and not self._has_state_without(rank):
                continue
            self.strikes[how] += 1
            if how == "kill":
                process.kill()
                process.join()  # what it last wrote on the board stands before it is read again
                self.board[_FIELDS * rank] = 0
                self.back_at[rank] = now + self.random.choice((0.0, self.random.uniform(0.0, 1.0)))
            else:
                os.kill(process.pid, signal.SIGSTOP)
                self.wake_at[rank] = now + self.random.uniform(0.01, 1.5)

    def _has_state_without(self, rank: int) -> bool:
        """Whether a living rank other than this one has the state after the last finished step or the one before."""
        steps = self.board[::_FIELDS]
        return any(
            process.is_alive() and steps[other] >= max(steps) - 1
            for other, process in enumerate(self.processes)
            if other != rank
        )

    def _revive(self, now: float) -> None:
        for rank, process in enumerate(self.processes):
            if self.wake_at[rank] and now >= self.wake_at[rank]:
                self.wake_at[rank] = 0.0
                os.kill(process.pid, signal.SIGCONT)
            if not process.is_alive() and now >= self.back_at[rank]:
                assert process.exitcode == -signal.SIGKILL, f"rank {rank} ended by itself: {process.exitcode}"
                process.close()
                self.processes[rank] = self.start(rank)
                self.strikes["start"] += 1

    def _end(self) -> None:
        """Peace: everybody lives, and the job ends by itself, soon."""
        self._revive(float("inf"))
        self.last_step.value = max(self.board[::_FIELDS]) + 20
        deadline = time.monotonic() + self.stuck_s
        for rank, process in enumerate(self.processes):
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"rank {rank} does not end\n{self._stacks()}"
            assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"

    def _stacks(self) -> str:
        for process in self.processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                    os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = [f"[rank {rank}]\n{(self.folder / f'stack{rank}').read_text()}" for rank in range(RANKS)]
        return f"board {list(self.board)}\n" + "\n".join(stacks)


def soak(seed: int, duration_s: float, stuck_s: float, transport: str = "shm") -> dict[str, float]:
    """Runs the job for ``duration_s`` over ``transport``; returns the steps done, the generations needed, the strikes
    dealt and the longest times without a finished step.
    """
    descriptors = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        done = Soak(seed, folder, stuck_s, transport).run(duration_s)
    left = [name for name in os.listdir("/dev/shm") if "pycomm" in name]
    assert not left, left
    assert len(os.listdir("/proc/self/fd")) < descriptors + 64, "descriptors of the supervisor"
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--stuck", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--transport", choices=("shm", "torch", "mixed"), default="shm", help="mixed: two ranks a host")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    print(soak(options.seed, 60 * options.minutes, options.stuck, options.transport))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # so that the ranks find this module by its name
    import soak as module

    module.main()
