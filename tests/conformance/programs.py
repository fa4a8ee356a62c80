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
from typing import Any, NamedTuple

import torch

import pycomm
from pycomm import ReduceOp

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import cases

SIZES = [0, 1, 1, 2, 3, 7, 16, 17, 100, 256, 1000, 1024, 1025, 4096, 4099, 16384, 20_000, 65_536, 65_537, 131_072]
SIZES += [300_007]
_OFTEN = torch.float32
DTYPES = [_OFTEN, _OFTEN, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
VERBS = ["all_reduce", "all_reduce", "all_reduce", "broadcast", "reduce", "gather", "scatter", "barrier"]
VERBS += ["all_gather", "all_gather_single", "reduce_scatter", "reduce_scatter_single", "all_to_all"]
VERBS += ["all_to_all_single"]
MOST_GROUPS = 6
MOST_UNDER_WAY = 6


class Made(NamedTuple):
    """A group as all ranks know it."""

    group: Any  # or NON_MEMBER
    ranks: tuple[int, ...]
    parents: tuple[tuple[int, int], ...] = ()  # what it is closed with, as (step, number)
    name: tuple[int, int] = (0, 0)


class Program:
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

    def note(self, text: str) -> None:
        self.log.append(f"{self.step}: {text}")
        del self.log[:-5]

    def wait_for_one(self) -> None:
        work, check, what = self.under_way.pop(self.own.randrange(len(self.under_way)))
        try:
            work.wait()
            check()
        except Exception as error:
            error.add_note(f"waiting for {what}")
            raise

    def done(self, work: Any, check: Callable[[], None]) -> None:
        if work is None:
            check()
        else:
            self.under_way.append((work, check, self.log[-1]))

    def pick_group(self) -> tuple[Any, tuple[int, ...]]:
        return self.dice.choice(self.groups)[:2]

    # -- what tensors lie in -------------------------------------------------------------------------------------------

    def place(self, values: torch.Tensor) -> tuple[Any, Callable[[], torch.Tensor]]:
        """An argument that holds ``values``, in this rank's own sort of memory, and what reads it after the call."""
        how = self.own.choice(("plain", "guarded", "guarded", "strided", "transposed", "shared", "numpy", "odd"))
        if how == "guarded":
            guarded = cases.guarded(values)

            def read() -> torch.Tensor:
                assert guarded.is_intact(), "wrote beside the buffer"
                return guarded.flat

            return guarded.flat, read
        if how == "strided":
            wide = torch.full((values.numel(), 3), 1, dtype=values.dtype)
            wide[:, 1] = values

            def read_strided() -> torch.Tensor:
                assert bool((wide[:, ::2] == 1).all()), "wrote between the elements"
                return wide[:, 1].contiguous()

            return wide[:, 1], read_strided
        if how == "transposed" and values.numel() % 2 == 0 and values.numel():
            turned = values.view(2, -1).t().clone(memory_format=torch.contiguous_format).t()
            return turned, lambda: turned.contiguous().view(-1)
        if how == "shared" and self.transport == "shm" and values.numel():
            buffer = pycomm.empty(values.numel(), dtype=values.dtype, shared=True)
            buffer.copy_(values)
            return buffer, lambda: buffer
        if how == "numpy" and values.dtype != torch.bfloat16:
            array = values.clone().numpy()
            return array, lambda: torch.from_numpy(array)
        if how == "odd":
            odd = torch.empty(values.numel() + 1, dtype=values.dtype)[1:]
            odd.copy_(values)
            return odd, lambda: odd
        copy = values.clone()
        return copy, lambda: copy

    def input(self, member: int, n: int, numel: int, dtype: torch.dtype, op: ReduceOp = ReduceOp.SUM) -> torch.Tensor:
        """What ``member`` of a group of ``n`` puts in at this step: another at each."""
        return cases.contribution(member + 2 * (self.step % 50) * n, n, numel, dtype, op)

    def expect(self, read: Callable[[], torch.Tensor], expected: torch.Tensor, what: str) -> Callable[[], None]:
        step = self.step

        def check() -> None:
            got = read().clone(memory_format=torch.contiguous_format)
            if not cases.same_bits(got.view(-1), expected.view(-1)):
                wrong = (got.view(-1) != expected.view(-1)).nonzero().view(-1)
                few = wrong[:5]
                raise AssertionError(
                    f"rank {self.rank}, step {step}: {what}: {len(wrong)} of {got.numel()} wrong, first at "
                    f"{few.tolist()}: got {got.view(-1)[few].tolist()}, expected {expected.view(-1)[few].tolist()}"
                )

        return check

    # -- the steps -----------------------------------------------------------------------------------------------------

    def collective(self) -> None:
        group, ranks = self.pick_group()
        verb, dtype = self.dice.choice(VERBS), self.dice.choice(DTYPES)
        op = ReduceOp.SUM if self.dice.random() < 0.5 else self.dice.choice(cases.ops_of(dtype))
        numel, root = self.dice.choice(SIZES), self.dice.randrange(len(ranks))
        is_async = self.dice.random() < 0.4
        if rank_is_out(group):
            return
        n, me = len(ranks), group.rank
        self.note(f"{verb} {dtype} {op.name} {numel} root {root} of {ranks} async={is_async}")
        options: dict[str, Any] = {"group": group, "async_op": is_async}
        getattr(self, f"_{verb}")(numel, dtype, op, root, n, me, options)

    def _all_reduce(self, numel: int, dtype: Any, op: ReduceOp, root: int, n: int, me: int, options: Any) -> None:
        inputs = [self.input(member, n, numel, dtype, op) for member in range(n)]
        argument, read = self.place(inputs[me])
        if self.dice.random() < 0.15 and n > 1:
            options["algorithm"] = self.dice.choice(("ring", "tree", "direct", "recursive_doubling"))
        self.done(
            pycomm.all_reduce(argument, cases.argument_of(op, me), **options),
            self.expect(read, cases.reduced(inputs, op), self.log[-1]),
        )

    def _broadcast(self, numel: int, dtype: Any, op: ReduceOp, root: int, n: int, me: int, options: Any) -> None:
        value = self.input(root, n, numel, dtype)
        argument, read = self.place(value if me == root else torch.zeros_like(value))
        self.done(pycomm.broadcast(argument, group_src=root, **options), self.expect(read, value, self.log[-1]))

    def _reduce(self, numel: int, dtype: Any, op: ReduceOp, root: int, n: int, me: int, options: Any) -> None:
        inputs = [self.input(member, n, numel, dtype, op) for member in range(n)]
        argument, read = self.place(inputs[me])
        expected = cases.reduced(inputs, op) if me == root else inputs[me]
        work = pycomm.reduce(argument, op=cases.argument_of(op, me), group_dst=root, **options)
        self.done(work, self.expect(read, expected, self.log[-1]))

    def _all_gather(self, numel: int, dtype: Any, op: ReduceOp, root: int, n: int, me: int, options: Any) -> None:
        is_even = self.dice.random() < 0.6
        lengths = [numel if is_even else self.dice.choice(SIZES[:14]) for _ in range(n)]
        values = [self.input(member, n, length, dtype) for member, length in enumerate(lengths)]
        outs = [self.place(torch.zeros_like(value)) for value in values]
        mine, _ = self.place(values[me])
        work = pycomm.all_gather([out for out, _ in outs], mine, **options)
        self.done(work, self.all_of([self.expect(read, value, self.log[-1]) for (_, read), value in zip(outs, values)]))

    def _all_gather_single(
        self, numel: int, dtype: Any, op: ReduceOp, root: int, n: int, me: int, options: Any
    ) -> None:
        whole = torch.cat([self.input(member, n, numel, dtype) for member in range(n)])
        in_place = self.dice.random() < 0.3
        out, read = self.place(torch.zeros_like(whole))
        mine: Any
        if in_place and isinstance(out, torch.Tensor) and out.is_contiguous():
            mine = out.view(-1)[me * numel : (me + 1) * numel]
            mine.copy_(whole[me * numel : (me + 1) * numel])
        else:
            mine, _ = self.place(whole[me * numel : (me + 1) * numel].clone())
        self.done(pycomm.all_gather_single(out, mine, **options), self.expect(read, whole, self.log[-1]))

    def _reduce_scatter(self, numel: int, dtype: Any, op: ReduceOp, root: int, n: int, me: int, options: Any) -> None:
        is_even = self.dice.random() < 0.6
        lengths = [numel if is_even else self.dice.choice(SIZES[:14]) for _ in range(n)]
        inputs = [
            [self.input(member + 2 * part * n, n, length, dtype, op) for part, length in enumerate(lengths)]
            for member in range(n)
        ]
        out, read = self.place(torch.zeros_like(inputs[me][me]))
        mine = [self.place(value)[0] for value in inputs[me]]
        expected = cases.reduced([inputs[member][me] for member in range(n)], op)
        work = pycomm.reduce_scatter(out, mine, cases.argument_of(op, me), **options)
        self.done(work, self.expect(read, expected, self.log[-1]))

    def _reduce_scatter_single(
        self, numel: int, dtype: Any, op: ReduceOp, root: int, n: int, me: int, options: Any
    ) -> None:
        inputs = [self.input(member, n, numel * n, dtype, op) for member in range(n)]
        out, read = self.place(torch.zeros(numel, dtype=dtype))
        mine, _ = self.place(inputs[me])
        expected = cases.reduced(inputs, op)[me * numel : (me + 1) * numel]
        work = pycomm.reduce_scatter_single(out, mine, cases.argument_of(op, me), **options)
        self.done(work, self.expect(read, expected, self.log[-1]))

    def _gather(self, numel: int, dtype: Any, op: ReduceOp, root: int, n: int, me: int, options: Any) -> None:
        values = [self.input(member, n, numel, dtype) for member in range(n)]
        mine, _ = self.place(values[me])
        outs = [self.place(torch.zeros_like(value)) for value in values] if me == root else []
        work = pycomm.gather(mine, [out for out, _ in outs] if me == root else None, group_dst=root, **options)
        self.done(work, self.all_of([self.expect(read, value, self.log[-1]) for (_, read), value in zip(outs, values)]))

    def _scatter(self, numel: int, dtype: Any, op: ReduceOp, root: int, n: int, me: int, options: Any) -> None:
        values = [self.input(member, n, numel, dtype) for member in range(n)]
        out, read = self.place(torch.zeros(numel, dtype=dtype))
        parts = [self.place(value)[0] for value in values] if me == root else None
        work = pycomm.scatter(out, parts, group_src=root, **options)
        self.done(work, self.expect(read, values[me], self.log[-1]))

    def _splits(self, n: int) -> list[list[int]]:
        """Elements that each member sends to each other one."""
        if self.dice.random() < 0.4:
            return [[self.dice.choice(SIZES[:16])] * n] * n
        return [[self.dice.choice(SIZES[:16]) for _ in range(n)] for _ in range(n)]

    def _all_to_all(self, numel: int, dtype: Any, op: ReduceOp, root: int, n: int, me: int, options: Any) -> None:
        splits = self._splits(n)
        parts = [[self.input(i + 2 * j * n, n, splits[i][j], dtype) for j in range(n)] for i in range(n)]
        outs = [self.place(torch.zeros_like(parts[i][me])) for i in range(n)]
        work = pycomm.all_to_all([out for out, _ in outs], [self.place(part)[0] for part in parts[me]], **options)
        self.done(
            work, self.all_of([self.expect(read, parts[i][me], self.log[-1]) for i, (_, read) in enumerate(outs)])
        )

    def _all_to_all_single(
        self, numel: int, dtype: Any, op: ReduceOp, root: int, n: int, me: int, options: Any
    ) -> None:
        splits = self._splits(n)
        parts = [[self.input(i + 2 * j * n, n, splits[i][j], dtype) for j in range(n)] for i in range(n)]
        expected = torch.cat([parts[i][me] for i in range(n)])
        out, read = self.flat_place(torch.zeros_like(expected))
        mine, _ = self.flat_place(torch.cat(parts[me]))
        work = pycomm.all_to_all_single(out, mine, [splits[i][me] for i in range(n)], splits[me], **options)
        self.done(work, self.expect(read, expected, self.log[-1]))

    def flat_place(self, values: torch.Tensor) -> tuple[Any, Callable[[], torch.Tensor]]:
        """``place`` with one dimension."""
        while True:
            argument, read = self.place(values)
            if argument.ndim == 1:
                return argument, read

    def _barrier(self, numel: int, dtype: Any, op: ReduceOp, root: int, n: int, me: int, options: Any) -> None:
        self.done(pycomm.barrier(**options), lambda: None)

    def all_of(self, checks: list[Callable[[], None]]) -> Callable[[], None]:
        def check_all() -> None:
            for check in checks:
                check()

        return check_all

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


def rank_is_out(group: Any) -> bool:
    return not isinstance(group, pycomm.Group)


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
