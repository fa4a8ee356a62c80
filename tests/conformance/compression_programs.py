"""Compressed calls that no person would make: by any compressor in any wrappers, of any tensors together.

    python tests/conformance/compression_programs.py --transport shm --ranks 3 --seed 4711 --steps 500

As programs.py, whose calls are among the steps. An account is kept of every tensor that a compressor with feedback is
given: whatever came before (other verbs, tensors that went together or alone, a saved state loaded by another
compressor, calls that were refused), what arrived and what the ranks still owe is what was put in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import cases
from programs import Program, main

import pycomm
from pycomm import ReduceOp
from pycomm.compression import Compressor, Part, error_feedback, every, merge_states, momentum, parse

SPARSE = ["topk:0.1", "topk:0.6", "topk:0.02,exchange=balanced", "topk:0.05,tolerance=0.3", "randomk:0.1"]
SPARSE += ["threshold:0.5,ratio=0.3", "topk:1.0"]
DENSE = ["none", "bf16", "fp16", "int8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4:rounding=stochastic"]
DENSE += ["int8:block_numel=64", "qsgd", "qsgd:levels=7,block_numel=128", "sign", "sign:64", "ternary"]
DENSE += ["ternary:rounding=nearest", "powersgd:1", "powersgd:3"]
SHAPES = [(0,), (1,), (7,), (97,), (1024,), (4099,), (60, 100), (33, 5), (3, 4, 5), (1, 300), (300, 1), (300, 70)]
ALGORITHMS = [None] * 6 + ["auto", "direct", "ring", "tree", "halving_doubling", "recursive_doubling", "hierarchical"]
MOST_COMPRESSORS = 5


class Named(NamedTuple):
    """A tensor that is reduced (``scattered``: that of which each rank gets a part) under one name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scattered: bool


class Account:
    """What all ranks gave of one tensor, and what each of them got; ``slack`` is what rounding may take."""

    def __init__(self, given: torch.Tensor) -> None:
        self.given, self.got = given.clone(), torch.zeros_like(given)
        self.slack = 0.0


class Used:
    """A compressor, and the accounts of what it was given."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.compressor = parse(spec)
        self.accounts: dict[str, Account] = {}
        self.largest: dict[str, float] = {}  # given or arrived so far, by names: sums keep its rounding

    @property
    def layers(self) -> Iterator[Compressor]:
        """The outermost first."""
        each: Any = self.compressor
        while each is not None:
            yield each
            each = getattr(each, "inner", None)

    @property
    def feeds_back(self) -> bool:
        """What is not sent now is sent later, all of it, so that accounts can be kept."""
        kinds = [each for each in self.layers if isinstance(each, (error_feedback, momentum))]
        return any(each.mode == "classic" if isinstance(each, error_feedback) else each.m == 0 for each in kinds)

    @property
    def estimates(self) -> error_feedback | None:
        """The layer that keeps estimates, of EF21."""
        found = [each for each in self.layers if isinstance(each, error_feedback) and each.mode == "ef21"]
        return found[0] if found else None

    def is_due(self, name: str) -> bool:
        """Whether the next call with the tensor ``name`` sends something."""
        return all(each.is_due(name) for each in self.layers if isinstance(each, every))

    def owed(self, name: str, numel: int) -> torch.Tensor:
        """What this rank has not sent, ``(numel,)`` of float64."""
        return sum(
            (kept[name].double() for kept in _buffers(self.compressor.state_dict()) if name in kept),
            torch.zeros(numel, dtype=torch.float64),
        )


def _buffers(state: Mapping[str, Any]) -> Iterator[Mapping[str, torch.Tensor]]:
    for key, value in state.items():
        if key in ("residuals", "owed"):
            yield value
        elif isinstance(value, Mapping):
            yield from _buffers(value)


class CompressionProgram(Program):
    """One rank's part of such a program."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.used: list[Used] = []
        self.n, self.me = self.world.world_size, self.world.rank
        dtypes = [torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16]
        self.tensors = []
        for number in range(14):
            shape, dtype = self.dice.choice(SHAPES), self.dice.choice(dtypes)
            scattered = self.dice.random() < 0.3
            name = f"{self.dice.choice(['layer', 'norm', 'embed'])}.{number}"
            if scattered:
                shape = (self.n * torch.Size(shape).numel(),)
            self.tensors.append(Named(name, shape, dtype, scattered))

    def weights(self) -> dict[Callable[[], None], int]:
        calls = {self.reduced: 50, self.together: 20, self.scattered: 20, self.gathered: 10}
        others = {self.refused: 6, self.saved: 6, self.merged: 4, self.another: 8, self.not_finite: 3}
        return {**calls, **others, self.collective: 6, self.new_group: 1, self.close_group: 1}

    # -- compressors ---------------------------------------------------------------------------------------------------

    def draw(self) -> str:
        is_sparse = self.dice.random() < 0.5
        spec = self.dice.choice(SPARSE if is_sparse else DENSE)
        feedback = ["", "+ef", "+ef", "+ef", "+ef21", "+ef21:m=0.9"]
        if is_sparse:
            feedback += ["+dgc:m=0.0", "+dgc:m=0.0,warmup=3", "+dgc:m=0.9"]
        spec += self.dice.choice(feedback)
        if self.dice.random() < 0.25:
            spec += f"+every:{self.dice.randint(1, 3)}"
        if self.dice.random() < 0.25:
            spec += f"+policy:min_numel={self.dice.choice([0, 50, 2000])},min_dim={self.dice.choice([0, 1, 2])}"
        return spec

    def another(self) -> None:
        """One more compressor, in the place of an old one if there are many."""
        if len(self.used) == MOST_COMPRESSORS:
            self.used.pop(self.dice.randrange(MOST_COMPRESSORS))
        self.used.append(Used(self.draw()))
        self.note(f"another {self.used[-1].spec}")

    def pick(self) -> Used:
        if not self.used:
            self.another()
        return self.dice.choice(self.used)

    def pick_tensor(self, *, scattered: bool) -> Named:
        fits = [each for each in self.tensors if each.scattered == scattered]
        return self.dice.choice(fits) if fits else Named("only", (self.n * 20,), torch.float32, scattered)

    # -- data ----------------------------------------------------------------------------------------------------------

    def values(self, tensor: Named, salt: int = 0) -> list[torch.Tensor]:
        """Returns the input of each rank."""
        kind = self.dice.randrange(5)
        scale = self.dice.choice([1.0, 1.0, 1e-3, 100.0])
        found = []
        for member in range(self.n):
            generator = torch.Generator().manual_seed(self.seed * 64 + self.step * 4096 + salt * 16 + member)
            if kind == 0:
                each = torch.zeros(tensor.shape)
            elif kind == 1:
                each = torch.randint(-50, 51, tensor.shape, generator=generator).float()
            elif kind == 2:
                each = torch.full(tensor.shape, scale * (member + 1))
            else:
                each = scale * torch.randn(tensor.shape, generator=generator)
            found.append(each.to(tensor.dtype))
        return found

    def options(self, used: Used, name: str | None) -> dict[str, Any]:
        options: dict[str, Any] = {"compression": used.compressor, "name": name}
        algorithm = self.dice.choice(ALGORITHMS)
        return options if algorithm is None else {**options, "algorithm": algorithm}

    def placed(self, used: Used, values: torch.Tensor) -> tuple[Any, Callable[[], torch.Tensor]]:
        """As ``place``, of the shape of ``values`` where that matters to the compressor."""
        if values.dim() == 1 and not used.compressor.sees_shapes:
            return self.place(values)
        is_plain = values.dim() == 1 or self.own.random() < 0.6
        held = values.clone() if is_plain else values.mT.clone(memory_format=torch.contiguous_format).mT
        return held, lambda: held

    # -- the law -------------------------------------------------------------------------------------------------------

    def equal_everywhere(self, tensor: torch.Tensor, what: str) -> None:
        sums: list[Any] = [None] * self.n
        pycomm.all_gather_object(
            sums, cases.fingerprint(tensor.reshape(-1).clone(memory_format=torch.contiguous_format)), group=self.world
        )
        assert len(set(sums)) == 1, f"{what}: the ranks have {sums}"

    def settle(self, used: Used, tensor: Named, inputs: list[torch.Tensor], result: torch.Tensor, what: str) -> None:
        """Checks the law after a call whose sum is ``result``, of all that was given."""
        self.equal_everywhere(result, what)
        total, result = sum(each.double().reshape(-1) for each in inputs), result.double().reshape(-1)
        assert isinstance(total, torch.Tensor)
        assert result.isfinite().all(), f"{what}: not finite"
        largest = sum(float(each.abs().max()) for each in inputs if each.numel())
        so_far = used.largest.get(tensor.name, 0.0)
        used.largest[tensor.name] = max(so_far, largest, float(result.abs().max()) if result.numel() else 0.0)
        if not used.feeds_back:
            return
        account = used.accounts.setdefault(tensor.name, Account(torch.zeros_like(total)))
        owed = used.owed(tensor.name, total.numel())
        mine = owed.clone()
        pycomm.all_reduce(owed, group=self.world)
        account.given += total
        account.got += result
        sent = max((float(each.abs().max()) for each in (result, owed, mine) if each.numel()), default=0.0)
        # What float32 rounds, and the result in its own type.
        account.slack += 3e-6 * (largest + sent) * self.n
        if tensor.dtype != torch.float32:
            kind = torch.finfo(tensor.dtype)
            account.slack += kind.eps * (sent + self.n * kind.smallest_normal)
        off = float((account.got + owed - account.given).abs().max()) if total.numel() else 0.0
        assert off <= account.slack, f"{what}: {used.spec} lost {off}, slack {account.slack}"

    def follow(self, used: Used, tensor: Named, result: torch.Tensor, what: str) -> None:
        """Checks that what EF21 gives is the sum of the ranks' estimates."""
        layer = used.estimates
        if layer is None or tensor.name not in layer.state_dict()["error_feedback"]["residuals"]:
            return
        estimates = layer.residual(tensor.name).double()
        pycomm.all_reduce(estimates, group=self.world)
        result = result.double().reshape(-1)
        if result.numel():
            scale = float(estimates.abs().max()) + used.largest[tensor.name]
            slack = scale * self.n * (torch.finfo(tensor.dtype).eps + 1e-5 * (1 + self.step / 50)) + 1e-4
            off = float((estimates - result).abs().max())
            assert off <= slack, f"{what}: {used.spec} is {off} from the sum of the estimates, slack {slack}"

    @contextmanager
    def unchanged_by_error(self, used: Used, read: Callable[[], torch.Tensor], what: str) -> Iterator[list[Exception]]:
        """Gives a list for the error of a call, which then has to leave the tensor and the state as they were."""
        tensor = read().clone()
        before = {name: used.owed(name, account.given.numel()) for name, account in used.accounts.items()}
        refused: list[Exception] = []
        try:
            yield refused
        except (pycomm.CollectiveMismatchError, pycomm.PlanError, pycomm.ConfigError) as error:
            refused.append(error)
        if refused:
            assert torch.equal(read(), tensor), f"{what}: {refused} left another tensor"
            for name, owed in before.items():
                assert torch.equal(used.owed(name, owed.numel()), owed), f"{what}: {refused} left {name} owing else"

    # -- steps ---------------------------------------------------------------------------------------------------------

    def reduced(self) -> None:
        used, tensor = self.pick(), self.pick_tensor(scattered=False)
        inputs, options = self.values(tensor), self.options(used, tensor.name)
        op = self.dice.choice([ReduceOp.SUM, ReduceOp.SUM, ReduceOp.AVG])
        is_async = self.dice.random() < 0.3
        what = f"all_reduce {op.name} {tensor} by {used.spec} {options.get('algorithm')} async={is_async}"
        self.note(what)
        is_due = used.is_due(tensor.name)
        argument, read = self.placed(used, inputs[self.me])
        with self.unchanged_by_error(used, read, what) as refused:
            work = pycomm.all_reduce(argument, op, self.world, is_async, **options)
            if work is not None:
                work.wait()
        if self.told_alike(refused, "algorithm" in options, what):
            return
        result = read().double() * (self.n if op is ReduceOp.AVG else 1)
        self.settle(used, tensor, inputs, result, what)
        if is_due:
            self.follow(used, tensor, result, what)

    def told_alike(self, refused: list[Exception], may_be: bool, what: str) -> bool:
        """Says whether the call was refused: on all ranks, and only if it ``may_be``."""
        told: list[Any] = [None] * self.n
        pycomm.all_gather_object(told, [type(each).__name__ for each in refused], group=self.world)
        assert told == [told[0]] * self.n, f"{what}: {told}, {refused}"
        assert not refused or may_be, f"{what}: {refused}"
        return bool(refused)

    def told_of_flats(self, refused: list[Exception], used: Used, options: dict[str, Any], what: str) -> bool:
        """As ``told_alike``, of a call that takes tensors as flat: compressors for matrices alone are refused."""
        assert refused or used.compressor.is_for_vectors, f"{what}: would compress nothing"
        return self.told_alike(refused, "algorithm" in options or not used.compressor.is_for_vectors, what)

    def together(self) -> None:
        """Several tensors in one call, in any order."""
        used = self.pick()
        dtype = self.dice.choice([each.dtype for each in self.tensors])
        fits = [each for each in self.tensors if not each.scattered and each.dtype == dtype]
        chosen = self.dice.sample(fits, self.dice.randint(min(1, len(fits)), len(fits)))
        what = f"together {[(each.name, each.shape) for each in chosen]} {dtype} by {used.spec}"
        self.note(what)
        given = [self.values(each, salt) for salt, each in enumerate(chosen)]
        placed = [self.placed(used, inputs[self.me]) for inputs in given]
        routed = [each for each in chosen if used.compressor.routes([Part(each.name, each.shape)])[0][0].name != "none"]
        with pycomm.coalescing(self.world) if len({used.is_due(each.name) for each in routed}) < 2 else nullcontext():
            for tensor, (argument, _) in zip(chosen, placed, strict=True):
                pycomm.all_reduce(argument, group=self.world, compression=used.compressor, name=tensor.name)
        for tensor, inputs, (_, read) in zip(chosen, given, placed, strict=True):
            self.settle(used, tensor, inputs, read(), f"{what}: {tensor.name}")

    def scattered(self) -> None:
        used, tensor = self.pick(), self.pick_tensor(scattered=True)
        inputs, options = self.values(tensor), self.options(used, tensor.name)
        op = self.dice.choice([ReduceOp.SUM, ReduceOp.AVG])
        is_list = self.dice.random() < 0.3
        what = f"reduce_scatter {op.name} {tensor} by {used.spec} {options.get('algorithm')} list={is_list}"
        self.note(what)
        argument, read = self.placed(used, inputs[self.me])
        part = torch.empty(tensor.shape[0] // self.n, dtype=tensor.dtype)
        pieces = list(read().clone().chunk(self.n)) if tensor.shape[0] else [part.clone()] * self.n
        with self.unchanged_by_error(used, read, what) as refused:
            if is_list:
                pycomm.reduce_scatter(part, pieces, op, self.world, **options)
            else:
                pycomm.reduce_scatter_single(part, argument, op, self.world, **options)
        assert torch.equal(read(), inputs[self.me]), f"{what}: the input was written to"
        if self.told_of_flats(refused, used, options, what):
            return
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        pycomm.all_gather_single(whole, part, self.world)
        self.settle(used, tensor, inputs, whole.double() * (self.n if op is ReduceOp.AVG else 1), what)

    def gathered(self) -> None:
        """Each part is what a rank sent: its account is its own, under a name that no sum has."""
        used, tensor = self.pick(), self.pick_tensor(scattered=False)
        inputs, options = self.values(tensor), self.options(used, f"gathered {tensor.name}")
        what = f"all_gather {tensor} by {used.spec} {options.get('algorithm')}"
        self.note(what)
        numel = inputs[0].numel()
        whole = torch.empty(self.n * numel, dtype=tensor.dtype)
        argument, read = self.placed(used, inputs[self.me].reshape(-1))
        named = Part(f"gathered {tensor.name}", (numel,))
        if not all(each.is_for_gathers for each, _ in used.compressor.routes([named])):
            return
        with self.unchanged_by_error(used, read, what) as refused:
            pycomm.all_gather_single(whole, argument, self.world, **options)
        if self.told_of_flats(refused, used, options, what):
            return
        assert torch.equal(read(), inputs[self.me].reshape(-1)), f"{what}: the input was written to"
        self.equal_everywhere(whole, what)
        # The sum over the ranks of what arrived, and of what they owe, goes by the same law.
        gathered = Named(f"gathered {tensor.name}", (numel,), tensor.dtype, False)
        self.settle(used, gathered, inputs, whole.view(self.n, -1).double().sum(0), what)

    def not_finite(self) -> None:
        """One inf or NaN: nothing of it stays. What goes with it is lost, so the accounts begin anew."""
        used, tensor = self.pick(), self.pick_tensor(scattered=False)
        inputs = self.values(tensor)
        value, odd = self.dice.choice([float("inf"), float("-inf"), float("nan")]), self.dice.randrange(self.n)
        if not inputs[0].numel():
            return
        inputs[odd].view(-1)[self.dice.randrange(inputs[odd].numel())] = value
        what = f"{value} on {odd} in {tensor} by {used.spec}"
        self.note(what)
        argument, read = self.placed(used, inputs[self.me])
        for turn in range(4):  # with every:3 it goes out by the third
            pycomm.all_reduce(argument, group=self.world, compression=used.compressor, name=tensor.name)
            self.equal_everywhere(read(), what)
            argument, read = self.placed(used, torch.zeros(tensor.shape, dtype=tensor.dtype))
            assert turn < 3 or read().isfinite().all(), f"{what}: it comes again"
        owed = used.owed(tensor.name, inputs[0].numel())
        assert owed.isfinite().all(), f"{what}: it stays"
        pycomm.all_reduce(owed, group=self.world)
        used.accounts[tensor.name] = Account(owed)

    def refused(self) -> None:
        """One rank compresses otherwise: all are told, and nothing has changed."""
        used, tensor = self.pick(), self.pick_tensor(scattered=False)
        inputs, odd = self.values(tensor), self.dice.randrange(self.n)
        what = f"refused {tensor} by {used.spec}, other on {odd}"
        self.note(what)
        if self.n < 2:
            return
        other: Any = parse("fp8_e5m2:block_numel=32") if self.me == odd else used.compressor
        argument, read = self.placed(used, inputs[self.me])
        with self.unchanged_by_error(used, read, what) as refused:
            pycomm.all_reduce(argument, group=self.world, compression=other, name=tensor.name)
        assert [type(each) for each in refused] == [pycomm.CollectiveMismatchError], f"{what}: {refused}"

    def saved(self) -> None:
        """A state goes on in another compressor of the same text."""
        used = self.pick()
        self.note(f"saved {used.spec}")
        state = used.compressor.state_dict()
        used.compressor = parse(used.spec)
        used.compressor.load_state_dict(state)

    def merged(self) -> None:
        """As if the world had another size: what is owed is shared out, and in all the same."""
        used = self.pick()
        self.note(f"merged {used.spec}")
        states: list[Any] = [None] * self.n
        pycomm.all_gather_object(states, used.compressor.state_dict(), group=self.world)
        used.compressor = parse(used.spec)
        used.compressor.load_state_dict(merge_states(states))


if __name__ == "__main__":
    import compression_programs  # so that the ranks find this module by its name

    main(compression_programs.CompressionProgram, __doc__)
