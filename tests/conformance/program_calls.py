"""The collectives of a program (programs.py): each on tensors of any kind, and checked against torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import cases
import torch

import pycomm
from pycomm import ReduceOp

SIZES = [0, 1, 1, 2, 3, 7, 16, 17, 100, 256, 1000, 1024, 1025, 4096, 4099, 16384, 20_000, 65_536, 65_537, 131_072]
SIZES += [300_007]
_OFTEN = torch.float32
DTYPES = [_OFTEN, _OFTEN, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
VERBS = ["all_reduce", "all_reduce", "all_reduce", "broadcast", "reduce", "gather", "scatter", "barrier"]
VERBS += ["all_gather", "all_gather_single", "reduce_scatter", "reduce_scatter_single", "all_to_all"]
VERBS += ["all_to_all_single"]


class Made(NamedTuple):
    """A group as all ranks know it."""

    group: Any  # or NON_MEMBER
    ranks: tuple[int, ...]
    parents: tuple[tuple[int, int], ...] = ()  # what it is closed with, as (step, number)
    name: tuple[int, int] = (0, 0)


def rank_is_out(group: Any) -> bool:
    return not isinstance(group, pycomm.Group)


class Calls:
    """What a step of a program needs: dice, groups, tensors, what is expected of them; and its collectives."""

    rank: int
    step: int
    transport: str
    dice: random.Random  # rolls alike on all ranks,
    own: random.Random  # and this one does not
    groups: list[Made]
    under_way: list[tuple[Any, Callable[[], None], str]]
    log: list[str]

    def note(self, text: str) -> None:
        self.log.append(f"{self.step}: {text}")
        del self.log[:-5]

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

    def flat_place(self, values: torch.Tensor) -> tuple[Any, Callable[[], torch.Tensor]]:
        """``place`` with one dimension."""
        while True:
            argument, read = self.place(values)
            if argument.ndim == 1:
                return argument, read

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

    def all_of(self, checks: list[Callable[[], None]]) -> Callable[[], None]:
        def check_all() -> None:
            for check in checks:
                check()

        return check_all

    # -- the collectives -----------------------------------------------------------------------------------------------

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

    def _barrier(self, numel: int, dtype: Any, op: ReduceOp, root: int, n: int, me: int, options: Any) -> None:
        self.done(pycomm.barrier(**options), lambda: None)
