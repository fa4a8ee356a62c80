"""Programs that no person would write: calls of any kind, in any order, on any groups, many of them under way at once.

    python tests/conformance/programs.py --transport shm --ranks 3 --seed 4711 --steps 2000
    python tests/conformance/programs.py --transport mixed --ranks 4 --programs 20 --loses killed     # losses.py

All ranks of a program draw the same numbers, so they make the same calls, each of which is checked against torch. What
may differ between ranks differs: how a tensor lies in memory, how long a rank dawdles, in which order it waits. After
each step stands what the library promises whatever came before: the right result, guards that nobody wrote to, and
after a call that cannot be right an error on every rank that says so, and groups that go on.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import pycomm
from pycomm import ReduceOp

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import cases
from program_calls import DTYPES, SIZES, Calls, Made, rank_is_out

MOST_GROUPS = 6
MOST_UNDER_WAY = 6


class Program(Calls):
    """One rank's part of a program; ``dice`` rolls alike on all ranks, ``own`` does not."""

    def __init__(
        self,
        rank: int,
        seed: int,
        transport: str,
        world: Any = None,
        group_sizes: Sequence[int] = (),
    ) -> None:
        """``group_sizes`` are those of the groups that it makes by ``new_group``, by default any."""
        world = world or pycomm.get_group()
        self.group_sizes = group_sizes or range(1, len(world.ranks) + 1)
        self.rank = rank
        self.world = world
        self.seed = seed
        self.dice = random.Random(seed)
        self.own = random.Random(seed * 1000 + rank)
        self.transport = transport
        self.step = 0
        self.groups = [Made(world, world.ranks)]
        self.under_way: list[tuple[Any, Callable[[], None], str]] = []
        self.log: list[str] = []

    def run(self, steps: int) -> None:
        for self.step in range(1, steps + 1):
            self.dice = random.Random(self.seed * 1_000_003 + self.step)
            weights = self.weights()
            [what] = self.dice.choices(list(weights), list(weights.values()))
            try:
                what()
            except Exception as error:
                under_way = [each[2] for each in self.under_way]
                error.add_note(f"rank {self.rank}, step {self.step}: {self.log[-3:]}; under way {under_way}")
                raise
            if self.own.random() < 0.03:
                time.sleep(self.own.uniform(0, 0.003))
            while len(self.under_way) > MOST_UNDER_WAY or (self.under_way and self.own.random() < 0.2):
                self.wait_for_one()
        while self.under_way:
            self.wait_for_one()
        self.leave()

    def leave(self) -> None:
        """Closes what the program has made."""
        for made in self.groups[1:]:
            if not rank_is_out(made.group):
                made.group.close()

    def weights(self) -> dict[Callable[[], None], int]:
        """Returns the kinds of steps, and how often each is taken."""
        return {
            self.collective: 60,
            self.messages: 12,
            self.objects: 5,
            self.coalesced: 5,
            self.new_group: 4,
            self.close_group: 3,
            self.wrong: 4,
            self.compressed: 4,
        }

    def wait_for_one(self) -> None:
        work, check, what = self.under_way.pop(self.own.randrange(len(self.under_way)))
        try:
            work.wait()
            check()
        except Exception as error:
            error.add_note(f"waiting for {what}")
            raise

    # -- the steps -----------------------------------------------------------------------------------------------------

    def messages(self) -> None:
        """A few messages between random members; each started in an order of the rank's own."""
        group, ranks = self.pick_group()
        n = len(ranks)
        flights = []
        for number in range(self.dice.randrange(1, 6)):
            source, target = self.dice.randrange(n), self.dice.randrange(n)
            if source == target:
                continue
            tag = self.dice.choice((0, 0, 1, 7, 32758))
            flights.append((source, target, tag, self.dice.choice(SIZES), self.dice.choice(DTYPES), number))
        is_async = self.dice.random() < 0.5
        if rank_is_out(group):
            return
        me = group.rank
        self.note(f"messages {flights} in {ranks} async={is_async}")
        works = []
        ops = []
        for source, target, tag, numel, dtype, number in flights:
            value = self.input(source + 2 * number * n, n, numel, dtype)
            if me == source:
                ops.append((pycomm.isend, self.place(value)[0], target, tag, lambda: None))
            elif me == target:
                out, read = self.place(torch.zeros_like(value))
                ops.append((pycomm.irecv, out, source, tag, self.expect(read, value, self.log[-1])))
        if self.own.random() < 0.3 and ops:
            batch = [
                pycomm.P2POp(op, argument, group=group, tag=tag, group_peer=peer) for op, argument, peer, tag, _ in ops
            ]
            works = list(zip(pycomm.batch_isend_irecv(batch), [op[4] for op in ops]))
        else:
            for op, argument, peer, tag, check in ops:
                if op is pycomm.isend:
                    works.append((pycomm.isend(argument, group=group, tag=tag, group_dst=peer), check))
                else:
                    works.append((pycomm.irecv(argument, group=group, tag=tag, group_src=peer), check))
        for work, check in works:
            if is_async:
                self.done(work, check)
            else:
                work.wait()
                check()

    def objects(self) -> None:
        group, ranks = self.pick_group()
        n = len(ranks)
        root, length, which = self.dice.randrange(n), self.dice.choice(SIZES), self.dice.randrange(4)
        if rank_is_out(group):
            return
        me = group.rank
        self.note(f"objects {which} root {root} of {ranks}")
        values = [{"from": member, "step": self.step, "bytes": bytes(length * member % 50_000)} for member in range(n)]
        out: list[Any] = [None] * n
        if which == 0:
            pycomm.all_gather_object(out, values[me], group=group)
            assert out == values
        elif which == 1:
            pycomm.gather_object(values[me], out if me == root else None, group_dst=root, group=group)
            assert me != root or out == values
        elif which == 2:
            box = values[:] if me == root else out
            pycomm.broadcast_object_list(box, group_src=root, group=group)
            assert box == values
        else:
            one: list[Any] = [None]
            pycomm.scatter_object_list(one, values if me == root else None, group_src=root, group=group)
            assert one == [values[me]]

    def coalesced(self) -> None:
        group, ranks = self.pick_group()
        n, is_async = len(ranks), self.dice.random() < 0.5
        what = [
            (self.dice.choice(SIZES[:18]), self.dice.choice(DTYPES), number)
            for number in range(self.dice.randrange(1, 6))
        ]
        if rank_is_out(group):
            return
        me = group.rank
        self.note(f"coalesced {what} of {ranks} async={is_async}")
        checks = []
        with pycomm.coalescing(group, async_op=is_async) as manager:
            for numel, dtype, number in what:
                inputs = [self.input(member + 2 * number * n, n, numel, dtype) for member in range(n)]
                argument, read = self.place(inputs[me])
                pycomm.all_reduce(argument, group=group)
                checks.append(self.expect(read, cases.reduced(inputs, ReduceOp.SUM), self.log[-1]))
        self.done(manager if is_async else None, self.all_of(checks))

    def new_group(self) -> None:
        if len(self.groups) >= MOST_GROUPS:
            return
        if self.dice.choice(("new_group", "split")) == "new_group":
            everyone = self.world.ranks
            ranks = tuple(sorted(self.dice.sample(everyone, self.dice.choice(self.group_sizes))))
            self.note(f"new_group {ranks}")
            self.groups.append(Made(pycomm.new_group(ranks, group=self.world), ranks, name=(self.step, 0)))
            return
        parent, parent_ranks, above, name = self.dice.choice(self.groups)
        colors = [self.dice.choice((0, 0, 1, None)) for _ in parent_ranks]
        self.note(f"split {colors} of {parent_ranks}")
        made = pycomm.NON_MEMBER if rank_is_out(parent) else pycomm.split(colors[parent.rank], group=parent)
        for color in (0, 1):
            ranks = tuple(rank for rank, its in zip(parent_ranks, colors) if its == color)
            if ranks and len(self.groups) < MOST_GROUPS + 2:
                self.groups.append(
                    Made(made if self.rank in ranks else pycomm.NON_MEMBER, ranks, (*above, name), (self.step, color))
                )

    def close_group(self) -> None:
        if len(self.groups) < 2:
            return
        made = self.dice.choice(self.groups[1:])
        self.groups = [each for each in self.groups if each is not made and made.name not in each.parents]
        self.note(f"close {made.ranks}")
        while self.under_way:  # a message that nobody has waited for ends with its group
            self.wait_for_one()
        if not rank_is_out(made.group):
            made.group.close()

    def wrong(self) -> None:
        """A call that cannot be right: every rank is told, and the group goes on."""
        group, ranks = self.pick_group()
        n = len(ranks)
        numel, odd = self.dice.choice(SIZES[1:]), self.dice.randrange(n)
        which = self.dice.randrange(4)
        if rank_is_out(group) or n < 2:
            return
        me = group.rank
        self.note(f"wrong {which} by {odd} of {ranks}")
        tensor = torch.full((numel,), 3.0)
        before = tensor.clone()
        try:
            if which == 0:
                tensor = torch.full((numel + (me == odd),), 3.0)
                before = tensor.clone()
                pycomm.all_reduce(tensor, group=group)
            elif which == 1:
                pycomm.all_reduce(tensor, ReduceOp.MAX if me == odd else ReduceOp.SUM, group=group)
            elif which == 2:
                if me == odd:
                    pycomm.broadcast(tensor, group_src=odd, group=group)
                else:
                    pycomm.all_reduce(tensor, group=group)
            else:
                pycomm.reduce(tensor, group_dst=odd if me else (odd + 1) % n, group=group)
        except pycomm.CollectiveMismatchError:
            pass
        else:
            raise AssertionError("no error")
        assert torch.equal(tensor, before), "a call that was refused wrote to its tensor"

    def compressed(self) -> None:
        group, ranks = self.pick_group()
        n = len(ranks)
        numel = self.dice.choice(SIZES)
        codec = self.dice.choice(("bf16", "int8", "int4", "topk:0.1", "fp8_e4m3", "sign"))
        is_async = self.dice.random() < 0.5
        if rank_is_out(group):
            return
        me = group.rank
        self.note(f"compressed {codec} {numel} of {ranks} async={is_async}")
        values = torch.randn(numel, generator=torch.Generator().manual_seed(self.step * 64 + me))
        argument, read = self.place(values)
        work = pycomm.all_reduce(argument, group=group, compression=codec, async_op=is_async)

        if work is not None:
            work.wait()
        sums: list[Any] = [None] * n
        pycomm.all_gather_object(
            sums, cases.fingerprint(read().clone(memory_format=torch.contiguous_format)), group=group
        )
        assert len(set(sums)) == 1, f"{codec}: the ranks have {sums}"


def program(rank: int, seed: int, steps: int, transport: str, kind: type[Program] = Program) -> None:
    """Runs this rank's part of the program ``seed``."""
    kind(rank, seed, transport).run(steps)


def main(kind: type[Program], about: str | None) -> None:
    import losses

    from harness import run_ranks

    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--programs", type=int, default=1)
    parser.add_argument("--loses", choices=losses.HOW, help="one rank, at any moment")
    options = parser.parse_args()

    for seed in range(options.seed, options.seed + options.programs):
        begin = time.monotonic()
        print(f"seed {seed}", end=" ", flush=True)
        if options.loses:
            told = losses.run(options.ranks, seed, options.transport, options.loses, kind, timeout_s=60)
            print(*(len(each) for each in told if each), end=" ")
        else:
            job = (program, seed, options.steps, options.transport, kind)
            run_ranks(options.ranks, *job, transport=options.transport)
        print(f"{time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    import programs  # so that the ranks find this module by its name

    programs.main(programs.Program, __doc__)
