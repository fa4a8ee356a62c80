"""Items that no person would submit: to several streams at once, in any order, beside calls of all kinds.

    python tests/conformance/stream_programs.py --transport shm --ranks 3 --seed 4711 --steps 2000
    python tests/conformance/stream_programs.py --transport torch --ranks 3 --loses killed

As programs.py, whose calls are among the steps: all ranks submit the same items; how a tensor lies in memory, when a
rank submits and in which order it waits is each rank's own. Some items differ between the ranks, or raise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import cases
from program_calls import DTYPES, SIZES, rank_is_out
from programs import Program, main

import pycomm
from pycomm import ReduceOp

MOST_STREAMS = 4
SEGMENTS = [1 << 12, 1 << 14, 1 << 18, 2 << 20]  # bytes
DIFFERENCES = ("longer", "double", "op", "dtype", "priority", "function", "compressed")


class Opened(NamedTuple):
    """A stream as all ranks know it."""

    stream: Any  # or None, of a rank that is no member
    ranks: tuple[int, ...]


class Fails:
    """A handle of what has to fail; waiting for it says whether it did, as it should."""

    def __init__(self, work: pycomm.Work, expected: type[Exception]) -> None:
        self._work, self._expected = work, expected

    def wait(self) -> None:
        try:
            self._work.wait()
        except self._expected:
            return
        raise AssertionError(f"no {self._expected.__name__}")


class StreamProgram(Program):
    """One rank's part of such a program."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.streams: list[Opened] = []

    def weights(self) -> dict[Callable[[], None], int]:
        items = {self.item: 60, self.function: 15, self.differing: 10, self.compressed_item: 5, self.raising: 3}
        return super().weights() | items | {self.open: 5, self.end_one: 3, self.synchronize: 2}

    def leave(self) -> None:
        for each in self.streams:
            if each.stream is not None:
                each.stream.close()
        super().leave()

    # -- streams -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Of the world, and of groups that are closed with it: those of the program come and go."""
        if len(self.streams) == MOST_STREAMS:
            return
        ranks = self.world.ranks
        if self.dice.random() < 0.4:
            ranks = tuple(sorted(self.dice.sample(ranks, self.dice.choice(self.group_sizes))))
        segment_bytes = self.dice.choice(SEGMENTS)
        self.note(f"stream of {ranks}, segments of {segment_bytes}")
        group = self.world if ranks == self.world.ranks else pycomm.new_group(ranks, group=self.world)
        is_out = rank_is_out(group)
        stream = None if is_out else pycomm.CommStream(f"s{self.step}", group, segment_bytes=segment_bytes)
        self.streams.append(Opened(stream, ranks))

    def end_one(self) -> None:
        """Closes a stream whose items may be under way."""
        if self.streams:
            ended = self.streams.pop(self.dice.randrange(len(self.streams)))
            self.note(f"close the stream of {ended.ranks}")
            if ended.stream is not None:
                ended.stream.close()

    def synchronize(self) -> None:
        """All that was submitted is complete then."""
        for each in self.streams:
            if each.stream is not None:
                assert each.stream.synchronize(300.0)
                assert each.stream.step().comm_s >= 0

    def pick(self) -> tuple[Any, int, int]:
        """Returns a stream, the number of its ranks, and this rank's there; None for a stream without this rank."""
        if not self.streams:
            self.open()
        stream, ranks = self.dice.choice(self.streams)
        return stream, len(ranks), ranks.index(self.rank) if stream is not None else -1

    # -- items ---------------------------------------------------------------------------------------------------------

    def item(self) -> None:
        stream, n, me = self.pick()
        dtype, numel, priority = self.dice.choice(DTYPES), self.dice.choice(SIZES), self.dice.choice((0, 0, 0, 1, -1))
        op = ReduceOp.SUM if self.dice.random() < 0.5 else self.dice.choice(cases.ops_of(dtype))
        options = {"algorithm": self.dice.choice(("ring", "tree"))} if self.dice.random() < 0.1 and n > 1 else {}
        if stream is None:
            return
        self.note(f"item {dtype} {op.name} {numel} priority {priority} {options} of {stream.name}")
        inputs = [self.input(member, n, numel, dtype, op) for member in range(n)]
        argument, read = self.place_tensor(inputs[me])
        work = stream.all_reduce(argument, cases.argument_of(op, me), priority=priority, **options)
        self.done(work, self.expect(read, cases.reduced(inputs, op), self.log[-1]))

    def place_tensor(self, values: torch.Tensor) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        argument, read = self.place(values)
        return argument if isinstance(argument, torch.Tensor) else torch.from_numpy(argument), read

    def function(self) -> None:
        """Of another verb, or of two collectives in a row."""
        stream, n, me = self.pick()
        which, dtype, numel = self.dice.randrange(4), self.dice.choice(DTYPES), self.dice.choice(SIZES)
        priority, nbytes, root = self.dice.choice((0, 1)), self.dice.choice((0, 1000, 1 << 24)), self.dice.randrange(n)
        if stream is None:
            return
        self.note(f"function {which} {dtype} {numel} priority {priority} of {stream.name}")
        parts = [self.input(member, n, numel, dtype) for member in range(n)]
        mine, read_mine = self.place_tensor(parts[me])
        whole, read = self.place_tensor(torch.cat(parts) if which == 3 else torch.zeros(n * numel, dtype=dtype))
        checks = []
        if which == 0:
            checks.append(self.expect(read, torch.cat(parts), self.log[-1]))
        elif which == 1:
            checks.append(self.expect(read_mine, parts[root], self.log[-1]))
        elif which == 2:
            summed = cases.reduced(parts, ReduceOp.SUM)
            checks.append(self.expect(read_mine, summed, self.log[-1]))
            checks.append(self.expect(read, torch.cat([summed] * n), self.log[-1]))
        else:
            checks.append(self.expect(read_mine, cases.reduced([parts[me]] * n, ReduceOp.SUM), self.log[-1]))

        def call(group: pycomm.Group) -> None:
            if which == 1:
                pycomm.broadcast(mine, group_src=root, group=group)
            if which == 2:
                pycomm.all_reduce(mine, group=group)
            if which in (0, 2):
                pycomm.all_gather_single(whole, mine, group)
            if which == 3:
                pycomm.reduce_scatter_single(mine, whole, group=group)

        work = stream.submit(call, priority=priority, hold=[mine, whole], nbytes=nbytes)
        self.done(work, self.all_of(checks))

    def raising(self) -> None:
        """A function that raises on one rank, after its collective; the others' goes well."""
        stream, n, me = self.pick()
        odd, numel = self.dice.randrange(n), self.dice.choice(SIZES)
        if stream is None:
            return
        self.note(f"function that raises on {odd} of {stream.name}")
        inputs = [self.input(member, n, numel, torch.float32) for member in range(n)]
        tensor = inputs[me].clone()

        def call(group: pycomm.Group) -> None:
            pycomm.all_reduce(tensor, group=group)
            if me == odd:
                raise ZeroDivisionError

        work = stream.submit(call, hold=tensor)
        check = self.expect(lambda: tensor, cases.reduced(inputs, ReduceOp.SUM), self.log[-1])
        self.done(Fails(work, ZeroDivisionError) if me == odd else work, check)

    def differing(self) -> None:
        """An item that one rank submits otherwise than the others: all of them are told, and nothing is written."""
        stream, n, me = self.pick()
        odd, which, numel = self.dice.randrange(n), self.dice.choice(DIFFERENCES), self.dice.choice(SIZES[1:])
        priority = self.dice.choice((0, 1))
        if stream is None or n < 2:
            return
        self.note(f"{which} on {odd}, {numel} of {stream.name}")
        is_odd = me == odd
        length = {"longer": numel + 1, "double": 2 * numel}.get(which, numel) if is_odd else numel
        dtype = torch.float64 if is_odd and which == "dtype" else torch.float32
        tensor, read = self.place_tensor(torch.full((length,), 3, dtype=dtype))
        op = ReduceOp.MAX if is_odd and which == "op" else ReduceOp.SUM
        priority += is_odd and which == "priority"
        if is_odd and which == "function":
            work = stream.submit(lambda group: pycomm.all_reduce(tensor, group=group), priority=priority, hold=tensor)
        else:
            options = {"compression": "int8"} if is_odd and which == "compressed" else {}
            work = stream.all_reduce(tensor, op, priority=priority, **options)
        unchanged = self.expect(read, torch.full((length,), 3, dtype=dtype), self.log[-1])
        self.done(Fails(work, pycomm.CollectiveMismatchError), unchanged)

    def compressed_item(self) -> None:
        stream, _, me = self.pick()
        numel, codec = self.dice.choice(SIZES), self.dice.choice(("bf16", "int8", "topk:0.1+ef", "sign"))
        if stream is None:
            return
        self.note(f"compressed {codec} {numel} of {stream.name}")
        values = torch.randn(numel, generator=torch.Generator().manual_seed(self.step * 64 + me))
        argument, read = self.place_tensor(values)
        stream.all_reduce(argument, compression=codec, name=f"{codec}{numel}").wait()
        sums: list[Any] = [None] * stream.group.world_size
        mine = cases.fingerprint(read().clone(memory_format=torch.contiguous_format))
        stream.submit(lambda group: pycomm.all_gather_object(sums, mine, group)).wait()
        assert len(set(sums)) == 1, f"{codec}: the ranks have {sums}"


if __name__ == "__main__":
    import stream_programs  # so that the ranks find this module by its name

    main(stream_programs.StreamProgram, __doc__)
