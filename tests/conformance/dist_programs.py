"""Programs of calls of ``torch.distributed`` drawn at random, each made on a group of pycomm and on one of gloo.

    python tests/conformance/dist_programs.py --transport shm --ranks 3 --programs 20

What gloo does is what must come out: the same tensors, to the bit (inputs are small integers, whose sums are exact), by
all ways in which torch hands a call over: functions, functional collectives, autograd, coalescing, handles, futures.
Calls on pycomm's group stay under way, up to six, while those that follow are made.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import pycomm.torch_backend

SIZES = [0, 1, 1, 2, 3, 7, 16, 17, 100, 256, 1000, 1024, 1025, 4096, 4099, 16384, 20_000, 65_536, 65_537]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32]
DTYPES += [torch.uint8, torch.int8]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
BIT_OPS = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
MOST_GROUPS = 4
MOST_UNDER_WAY = 6
Outputs = Sequence[torch.Tensor]
# Given a group and this rank's own memory for values: makes a call; returns its handle, and what it has written.
Call = Callable[[Any, Callable[[torch.Tensor], torch.Tensor]], tuple[Any, Outputs]]


class Pair(NamedTuple):
    """Two groups of the same ranks; None on a rank outside."""

    pycomm: Any
    gloo: Any
    ranks: tuple[int, ...]


class Program:
    """One rank's part; ``dice`` rolls alike on all ranks, ``own`` does not."""

    def __init__(self, rank: int, seed: int, world: Pair, transport: str) -> None:
        self.rank, self.seed, self.transport = rank, seed, transport
        self.dice = random.Random(seed)
        self.own = random.Random(seed * 1000 + rank)
        self.pairs = [world]
        self.under_way: list[tuple[Any, Outputs, Outputs, str]] = []
        self.log: list[str] = []
        self.step = 0

    def run(self, steps: int) -> None:
        by_weight = {
            self.collective: 50,
            self.functional: 10,
            self.differentiable: 6,
            self.coalesced: 6,
            self.messages: 10,
            self.objects: 5,
            self.two_threads: 4,
            self.new_pair: 3,
        }
        for self.step in range(1, steps + 1):
            self.dice = random.Random(self.seed * 1_000_003 + self.step)
            [what] = self.dice.choices(list(by_weight), list(by_weight.values()))
            try:
                what()
            except Exception as error:
                error.add_note(f"rank {self.rank}, seed {self.seed}, step {self.step}: {self.log[-3:]}")
                raise
            while len(self.under_way) > MOST_UNDER_WAY or (self.under_way and self.own.random() < 0.2):
                self.end_one()
        while self.under_way:
            self.end_one()

    def note(self, text: str) -> None:
        self.log.append(f"{self.step}: {text}")
        del self.log[:-5]

    # -- making a call on both, and comparing --------------------------------------------------------------------------

    def both(self, pair: Pair, call: Call) -> None:
        """Makes ``call`` on gloo's group to its end, and on pycomm's."""
        work, expected = call(pair.gloo, lambda values: values.clone(memory_format=torch.contiguous_format))
        if work is not None:
            work.wait()
        work, got = call(pair.pycomm, self.place)
        self.under_way.append((work, got, expected, self.log[-1]))
        if work is None:
            self.end_one(-1)

    def end_one(self, index: int | None = None) -> None:
        which = self.own.randrange(len(self.under_way)) if index is None else index
        work, got, expected, what = self.under_way.pop(which)
        if work is not None:
            how = self.own.randrange(5)
            if how == 0 and hasattr(work, "is_completed"):
                deadline = time.monotonic() + 60
                while not work.is_completed():
                    assert time.monotonic() < deadline, f"not complete after a minute: {what}"
                    time.sleep(0)
            elif how == 1 and hasattr(work, "get_future"):
                told = work.get_future().then(lambda future: len(future.value()))
                told.wait()
            work.wait()
        for place, (mine, its) in enumerate(zip(got, expected, strict=True)):
            assert mine.dtype == its.dtype and mine.shape == its.shape, f"{what}: {mine.shape}, gloo {its.shape}"
            if not torch.equal(mine, its):
                wrong = (mine != its).reshape(-1).nonzero().view(-1)
                raise AssertionError(f"{what}: output {place}: {len(wrong)} of {mine.numel()}, first at {wrong[:5]}")

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's own sort of memory that holds ``values``."""
        how = self.own.choice(("plain", "plain", "offset", "strided", "transposed", "shared"))
        if how == "offset":
            odd = torch.empty(values.numel() + 1, dtype=values.dtype)[1:].view(values.shape)
            return odd.copy_(values)
        if how == "strided":
            return torch.empty((*values.shape, 2), dtype=values.dtype)[..., 1].copy_(values)
        if how == "transposed" and values.ndim > 1:
            return values.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
        if how == "shared" and values.numel() and self.transport == "shm":
            return pycomm.empty(values.numel(), dtype=values.dtype, shared=True).view(values.shape).copy_(values)
        return values.clone()

    def values(self, member: int, shape: Sequence[int], dtype: torch.dtype, most: int = 5) -> torch.Tensor:
        """What ``member`` puts in: small integers, another at each step."""
        numel = torch.Size(shape).numel()
        counted = torch.arange(numel) * 5 + member * 3 + self.step
        return ((counted ^ (counted >> 3)) % most).to(dtype).view(tuple(shape))

    def shape_of(self, numel: int) -> tuple[int, ...]:
        how = self.dice.randrange(4)
        if how == 0 and numel == 1:
            return ()
        if how == 1:
            return (numel, 2)
        return (2, 3, numel) if how == 2 and numel < 10_000 else (numel,)

    def pick(self) -> Pair:
        return self.dice.choice(self.pairs)

    # -- the steps -----------------------------------------------------------------------------------------------------

    def collective(self) -> None:
        pair, dtype, numel = self.pick(), self.dice.choice(DTYPES), self.dice.choice(SIZES)
        op = self.dice.choice(OPS if dtype.is_floating_point else OPS + BIT_OPS)
        shape, root, is_async = self.shape_of(numel), self.dice.randrange(len(pair.ranks)), self.dice.random() < 0.5
        verb = self.dice.choice(
            ("all_reduce", "all_reduce", "broadcast", "reduce", "all_gather", "into_tensor", "gather", "scatter")
            + ("reduce_scatter", "scatter_tensor", "all_to_all", "all_to_all_single", "barrier")
        )
        splits = [[self.dice.choice(SIZES[:14]) for _ in pair.ranks] for _ in pair.ranks]
        is_even, is_stacked = self.dice.random() < 0.5, self.dice.random() < 0.5
        if pair.pycomm is None:
            return
        n, me = len(pair.ranks), pair.ranks.index(self.rank)
        self.note(f"{verb} {dtype} {op} {shape} root {root} of {pair.ranks} async={is_async} {is_even} {is_stacked}")
        most = 3 if op == dist.ReduceOp.PRODUCT else 5
        mine = self.values(me, shape, dtype, most)
        parts = [self.values(me * n + part, shape, dtype, most) for part in range(n)]
        told = splits[me] if not is_even else [4] * n
        heard = [row[me] for row in splits] if not is_even else [4] * n

        def call(group: Any, place: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Outputs]:
            extra: dict[str, Any] = {"group": group, "async_op": is_async}
            if verb == "all_reduce":
                out = place(mine)
                return dist.all_reduce(out, op, **extra), [out]
            if verb == "broadcast":
                out = place(mine)
                return dist.broadcast(out, group_src=root, **extra), [out]
            if verb == "reduce":
                out = place(mine)
                return dist.reduce(out, op=op, group_dst=root, **extra), [out] if me == root else []
            if verb == "all_gather":
                outs = [place(torch.zeros_like(mine)) for _ in range(n)]
                return dist.all_gather(outs, place(mine), **extra), outs
            if verb == "into_tensor":
                flat = torch.Size(shape) or torch.Size([1])
                joined = n * flat[0], *flat[1:]  # gloo knows no other way
                out = torch.zeros((n, *shape) if is_stacked and group is pair.pycomm else joined, dtype=dtype)
                return dist.all_gather_into_tensor(out, place(mine.view(flat)), **extra), [out.view(joined)]
            if verb == "gather":
                outs = [place(torch.zeros_like(mine)) for _ in range(n)] if me == root else []
                return dist.gather(place(mine), outs if me == root else None, group_dst=root, **extra), outs
            if verb == "scatter":
                out, ins = place(torch.zeros_like(mine)), [place(part) for part in parts] if me == root else None
                return dist.scatter(out, ins, group_src=root, **extra), [out]
            if verb == "reduce_scatter":
                out = place(torch.zeros_like(mine))
                return dist.reduce_scatter(out, [place(part) for part in parts], op, **extra), [out]
            if verb == "scatter_tensor":
                out = torch.zeros(shape or (1,), dtype=dtype)
                given = torch.cat([part.view(out.shape) for part in parts])
                return dist.reduce_scatter_tensor(out, given, op, **extra), [out]
            if verb == "all_to_all":
                outs = [place(torch.zeros(length, dtype=dtype)) for length in heard]
                ins = [place(self.values(me + part, (length,), dtype)) for part, length in enumerate(told)]
                if group is pair.gloo:  # whose lists are of equal tensors
                    out = torch.cat(outs)
                    return dist.all_to_all_single(out, torch.cat(ins), heard, told, **extra), out.split(heard)
                return dist.all_to_all(outs, ins, **extra), outs
            if verb == "all_to_all_single":
                out = torch.zeros((sum(heard), 3), dtype=dtype)
                given = self.values(me, (sum(told), 3), dtype)
                sizes = (None, None) if is_even else (heard, told)
                return dist.all_to_all_single(out, given, *sizes, **extra), [out]
            return dist.barrier(**extra), []

        self.both(pair, call)

    def functional(self) -> None:
        pair, dtype, numel = self.pick(), self.dice.choice(DTYPES), self.dice.choice(SIZES)
        n = len(pair.ranks)
        verb = self.dice.choice(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "coalesced"))
        root, dim, op = self.dice.randrange(n), self.dice.randrange(2), self.dice.choice(("sum", "min", "max"))
        splits = [[self.dice.choice(SIZES[:14]) for _ in range(n)] for _ in range(n)]
        if pair.pycomm is None:
            return
        me = pair.ranks.index(self.rank)
        self.note(f"functional {verb} {dtype} {op} {numel} root {root} dim {dim} of {pair.ranks}")

        def call(group: Any, place: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Outputs]:
            mine = place(self.values(me, (numel, 2), dtype))
            if verb == "all_reduce":
                out: Any = funcol.all_reduce(mine, op, group)
            elif verb == "all_gather":
                out = funcol.all_gather_tensor(mine.contiguous(), dim, group)
            elif verb == "reduce_scatter":
                shape = (numel * n, 2) if dim == 0 else (numel, 2 * n)
                out = funcol.reduce_scatter_tensor(place(self.values(me, shape, dtype)).contiguous(), op, dim, group)
            elif verb == "all_to_all":
                told, heard = splits[me], [row[me] for row in splits]
                out = funcol.all_to_all_single(self.values(me, (sum(told), 2), dtype), heard, told, group)
            elif verb == "broadcast":
                out = funcol.broadcast(mine, root, group)
            else:
                outs = funcol.all_reduce_coalesced([mine, place(self.values(me, (7,), dtype))], op, group)
                return None, [each.clone() for each in outs]
            return None, [out.clone()]

        self.both(pair, call)

    def differentiable(self) -> None:
        pair, numel = self.pairs[0], self.dice.choice(SIZES[1:])  # torch's own take group ranks for global ones
        n = len(pair.ranks)
        verb = self.dice.choice(("all_reduce", "all_gather", "all_to_all_single", "broadcast", "reduce", "scatter"))
        root = self.dice.randrange(n)
        if pair.pycomm is None:
            return
        me = pair.ranks.index(self.rank)
        self.note(f"differentiable {verb} {numel} root {root} of {pair.ranks}")

        def call(group: Any, place: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Outputs]:
            mine = place(self.values(me, (numel,), torch.float32)).requires_grad_()
            leaves = [mine]
            source = pair.ranks[root]
            if verb == "all_reduce":
                out: Any = dist_nn.all_reduce(mine, group=group)
            elif verb == "all_gather":
                out = torch.cat(dist_nn.all_gather(mine.contiguous(), group=group))
            elif verb == "all_to_all_single":
                leaves = [place(self.values(me, (4 * n,), torch.float32)).contiguous().detach().requires_grad_()]
                out = dist_nn.all_to_all_single(torch.empty(4 * n), leaves[0], group=group)
            elif verb == "broadcast":
                out = dist_nn.broadcast(mine, source, group=group)
            elif verb == "reduce":
                out = dist_nn.reduce(mine, source, group=group)
            else:
                leaves = [self.values(me + part, (numel,), torch.float32).requires_grad_() for part in range(n)]
                out = dist_nn.scatter(leaves, source, group=group)
            (out * torch.arange(out.numel()).remainder(3)).sum().backward()
            is_out_defined = verb != "reduce" or me == root
            grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
            return None, [*([out.detach()] if is_out_defined else []), *grads]

        self.both(pair, call)

    def coalesced(self) -> None:
        pair, verb = self.pick(), self.dice.choice(("all_reduce", "all_gather", "reduce_scatter", "list"))
        what = [(self.dice.choice(SIZES), self.dice.choice(DTYPES)) for _ in range(self.dice.randrange(1, 6))]
        is_async = self.dice.random() < 0.5
        if pair.pycomm is None:
            return
        n, me = len(pair.ranks), pair.ranks.index(self.rank)
        if verb == "list":  # of one type, says torch
            what = [(numel, what[0][1]) for numel, _ in what]
        self.note(f"coalesced {verb} {what} of {pair.ranks} async={is_async}")

        def call(group: Any, place: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Outputs]:
            ins = [self.values(me + number, (numel * n,), dtype) for number, (numel, dtype) in enumerate(what)]
            if verb == "list":
                outs = [place(each) for each in ins]
                return dist.all_reduce_coalesced(outs, group=group, async_op=is_async), outs
            outs = []
            is_gloo = group is pair.gloo  # which cannot: one after the other
            manager: Any = None if is_gloo else dist._coalescing_manager(group, async_ops=is_async)
            handle = None if manager is None else manager.__enter__()
            for each in ins:
                if verb == "all_reduce":
                    outs.append(each.clone() if is_gloo else place(each))
                    dist.all_reduce(outs[-1], group=group)
                elif verb == "all_gather":
                    outs.append(torch.zeros(n * each.numel(), dtype=each.dtype))
                    dist.all_gather_into_tensor(outs[-1], each, group=group)
                else:
                    outs.append(torch.zeros(each.numel() // n, dtype=each.dtype))
                    dist.reduce_scatter_tensor(outs[-1], each, group=group)
            if manager is not None:
                manager.__exit__(None, None, None)
            return handle if is_async and not is_gloo else None, outs

        self.both(pair, call)

    def messages(self) -> None:
        pair = self.pick()
        n = len(pair.ranks)
        flights = []
        for number in range(self.dice.randrange(1, 6)):
            source, target = self.dice.randrange(n), self.dice.randrange(n)
            if source != target:
                flights.append((source, target, self.dice.choice((0, 0, 1, 7)), self.dice.choice(SIZES), number))
        how, dtype = self.dice.choice(("batch", "async", "blocking", "any")), self.dice.choice(DTYPES)
        if pair.pycomm is None:
            return
        me = pair.ranks.index(self.rank)
        self.note(f"messages {how} {flights} {dtype} of {pair.ranks}")

        def call(group: Any, place: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Outputs]:
            works, ops, outs = [], [], []
            for source, target, tag, numel, number in flights[:1] if how == "any" else flights:
                if how == "any":  # its own tag: others may have come to a later step; and gloo cannot send none
                    tag, numel = 8 + self.step % 1000, numel or 1
                values = self.values(source + number, (numel,), dtype)
                is_sent, peer = me == source, target if me == source else source
                if me not in (source, target):
                    continue
                tensor = place(values if is_sent else torch.zeros_like(values))
                outs += [] if is_sent else [tensor]
                if how == "batch":
                    start = dist.isend if is_sent else dist.irecv
                    ops.append(dist.P2POp(start, tensor, group=group, tag=tag, group_peer=peer))
                elif how == "async":
                    if is_sent:
                        works.append(dist.isend(tensor, group=group, tag=tag, group_dst=peer))
                    else:
                        works.append(dist.irecv(tensor, group=group, tag=tag, group_src=peer))
                elif is_sent:
                    dist.send(tensor, group=group, tag=tag, group_dst=peer)
                elif how == "any":
                    assert dist.recv(tensor, group=group, tag=tag) == pair.ranks[peer]
                else:
                    dist.recv(tensor, group=group, tag=tag, group_src=peer)
            if ops:
                works = dist.batch_isend_irecv(ops)
            for work in works:
                work.wait()
            return None, outs

        self.both(pair, call)

    def objects(self) -> None:
        pair = self.pick()
        n = len(pair.ranks)
        which, root, length = self.dice.randrange(4), self.dice.randrange(n), self.dice.choice(SIZES)
        if pair.pycomm is None:
            return
        me = pair.ranks.index(self.rank)
        self.note(f"objects {which} root {root} of {pair.ranks}")
        values = [{"from": member, "bytes": bytes(length * member % 50_000)} for member in range(n)]
        group, out = pair.pycomm, [None] * n
        if which == 0:
            dist.all_gather_object(out, values[me], group=group)
            assert out == values
        elif which == 1:
            dist.gather_object(values[me], out if me == root else None, group_dst=root, group=group)
            assert me != root or out == values
        elif which == 2:
            box: Any = values[:] if me == root else out
            dist.broadcast_object_list(box, group_src=root, group=group)
            assert box == values
        else:
            one: list[Any] = [None]
            dist.scatter_object_list(one, values if me == root else None, group_src=root, group=group)
            assert one == [values[me]]

    def two_threads(self) -> None:
        """Two groups, each used by a thread of its own at the same time."""
        if len(self.pairs) < 2:
            return
        pairs = self.dice.sample(self.pairs, 2)
        numels = [[self.dice.choice(SIZES) for _ in range(10)] for _ in pairs]
        self.note(f"two threads on {[pair.ranks for pair in pairs]}")
        wrong: list[BaseException] = []

        def use(pair: Pair, numels: list[int]) -> None:
            try:
                for number, numel in enumerate(numels):
                    out = torch.full((numel,), float(self.rank))
                    work = dist.all_reduce(out, group=pair.pycomm, async_op=number % 2 == 0)
                    if work is not None:
                        work.wait()
                    assert bool((out == sum(pair.ranks)).all())
            except BaseException as error:
                wrong.append(error)

        each = zip(pairs, numels)
        threads = [threading.Thread(target=use, args=(pair, of)) for pair, of in each if pair.pycomm is not None]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if wrong:
            raise wrong[0]

    def new_pair(self) -> None:
        everyone = self.pairs[0].ranks
        ranks = tuple(sorted(self.dice.sample(everyone, self.dice.randrange(1, len(everyone) + 1))))
        if len(self.pairs) >= MOST_GROUPS:
            gone = self.pairs.pop(self.dice.randrange(1, len(self.pairs)))
            self.note(f"destroy {gone.ranks}")
            while self.under_way:
                self.end_one()
            if gone.pycomm is not None:
                dist.destroy_process_group(gone.pycomm)
                dist.destroy_process_group(gone.gloo)
            return
        self.note(f"new group {ranks}")
        self.pairs.append(pair_of(ranks, self.rank, self.transport))


def pair_of(ranks: Sequence[int], rank: int, transport: str) -> Pair:
    options = pycomm.torch_backend.Options(transport=transport)
    made = (
        dist.new_group(list(ranks), backend="pycomm", pg_options=options),
        dist.new_group(list(ranks), backend="gloo"),
    )
    return Pair(*(made if rank in ranks else (None, None)), tuple(ranks))


def program(rank: int, seed: int, steps: int, transport: str, folder: str) -> None:
    """Runs this rank's part of the program ``seed``."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    n = pycomm.world_size()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{seed}", n), rank=rank, world_size=n)
    try:
        Program(rank, seed, pair_of(range(n), rank, transport), transport).run(steps)
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--programs", type=int, default=1)
    options = parser.parse_args()
    from harness import run_ranks

    for seed in range(options.seed, options.seed + options.programs):
        begin = time.monotonic()
        print(f"seed {seed}", end=" ", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            how = options.transport
            run_ranks(options.ranks, program, seed, options.steps, how, folder, transport=how, timeout_s=90)
        print(f"{time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    import dist_programs  # so that the ranks find this module by its name

    dist_programs.main()
