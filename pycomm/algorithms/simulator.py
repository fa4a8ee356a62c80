"""Runs all ranks of a plan in one process, on names instead of numbers, and proves what a plan promises.

``simulate`` raises PlanError, with rank and round, unless
- nothing deadlocks, though every message waits until both sides are there, and no message is lost or left over;
- a message is sent and received in rounds of the same number, and both sides agree on its size whatever the buffer's;
- nothing is read before it is written, or while a message comes into it;
- every output chunk ends with what the collective means: each contribution exactly once;
- the sums of a chunk are one expression on all ranks: bit-identical results.
``prove`` does so for buffers of their own and in place, and counts rounds and bytes; ``declared`` reads what the
algorithm's own table says they are.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from ..errors import PlanError
from ..topology import Topology
from . import ALGORITHMS, Algorithm
from ._terms import Terms
from .plan import Chunk, Plan, Recv, Reduce, Send, Space

__all__ = ["Counts", "Proof", "declared", "plans_of", "prove", "simulate"]

_NOTHING = -1
_COMING = -2
# Verbs whose ranks all have the whole buffer; for the others a rank has its part of it, or all parts.
_WHOLE = frozenset({"all_reduce", "reduce", "broadcast"})


class Counts(NamedTuple):
    """``rounds`` in which anything is sent, and the bytes that the busiest rank sends, as a fraction of the whole."""

    rounds: int
    sent: Fraction


@dataclass(frozen=True)
class Proof:
    """What ``simulate`` counted; S, the whole buffer, is 1. ``sums[c]`` words the sum of chunk c: "(x0 + x1) + x2"."""

    rounds: int
    sent: tuple[Fraction, ...]
    messages: tuple[int, ...]
    sums: tuple[str, ...]

    @property
    def counts(self) -> Counts:
        """Rounds and bytes of the busiest rank."""
        return Counts(self.rounds, max(self.sent))


def plans_of(algorithm: Algorithm, verb: str, topology: Topology, root: int = 0) -> list[Plan]:
    """Returns the plans of all ranks. Raises PlanError where the algorithm has none."""
    return [algorithm.plan(verb, rank, topology, root) for rank in range(topology.world_size)]


def prove(algorithm: Algorithm, verb: str, topology: Topology, root: int = 0) -> Proof:
    """Runs ``simulate`` on the plans of ``algorithm``, out of place and in place."""
    plans = plans_of(algorithm, verb, topology, root)
    simulate(plans, root, is_in_place=True)
    return simulate(plans, root)


def simulate(plans: Sequence[Plan], root: int = 0, is_in_place: bool = False) -> Proof:
    """Runs ``plans``, one a rank, against one another. Raises PlanError if they break a law on top of this file."""
    run = _Run(plans, root, is_in_place)
    run.go()
    run.check_outputs()
    whole, rounds = run.whole, {number for rank in run.ranks for number in rank.busy_rounds}
    reduced = plans[root].verb in ("all_reduce", "reduce") and len(plans) > 1
    outputs = run.ranks[root].cells(Space.OUTPUT) if reduced else []
    return Proof(
        rounds=len(rounds),
        sent=tuple(Fraction(rank.sent_chunks, whole) for rank in run.ranks),
        messages=tuple(rank.sent_messages for rank in run.ranks),
        sums=tuple(run.terms.words(term) for term in outputs),
    )


def declared(algorithm: str, verb: str, topology: Topology) -> Counts | None:
    """Returns what the table in the docstring of ``algorithm`` says of ``verb``; None if it has no such line.

    Its formulas may use n (ranks), p (largest power of two in n), m (hosts), L (ranks of the largest host), S (1).
    """
    pattern = rf"^{verb} {{2,}}(\S.*?) {{2,}}(\S.*)$"
    line = re.search(pattern, ALGORITHMS.load(algorithm).__doc__ or "", re.MULTILINE)
    if line is None:
        return None
    n = topology.world_size
    names = {"n": n, "p": 1 << (n.bit_length() - 1), "m": len(topology.hosts), "L": max(map(len, topology.hosts))}
    functions = {"ceil": math.ceil, "floor": math.floor, "log2": _log2, "min": min, "range": range, "sum": sum}
    values = {name: Fraction(value) for name, value in names.items()} | {"S": Fraction(1)} | functions
    rounds, sent = (eval(formula, {"__builtins__": {}} | values) for formula in line.groups())
    return Counts(int(rounds), Fraction(sent))


def _log2(value: Fraction) -> int | float:
    number = int(value)
    return number.bit_length() - 1 if number & (number - 1) == 0 else math.log2(number)


# -- the ranks ---------------------------------------------------------------------------------------------------------


class _Rank:
    """One rank: its memory, one term a chunk, and how far it is."""

    def __init__(self, plan: Plan, contributions: Sequence[int], alias: int | None) -> None:
        """``alias`` is the place of the smaller of input and output in the larger, None if each has its own memory."""
        self.plan = plan
        self.round = -1
        self.waiting: dict[tuple[int, bool], int] = {}  # (peer, whether it is a receive) -> messages
        self.sent_chunks = self.sent_messages = 0
        self.busy_rounds: list[int] = []
        self.written: dict[int, tuple[int, int]] = {}  # output chunk -> the round and peer it came in from
        inputs, outputs = list(contributions), [_NOTHING] * plan.output_chunks
        offsets = {Space.INPUT: 0, Space.OUTPUT: 0}
        if alias is not None and inputs and outputs:
            small, large = sorted(
                (Space.INPUT, Space.OUTPUT), key=lambda s: len(inputs if s is Space.INPUT else outputs)
            )
            offsets[small] = alias
            if large is Space.INPUT:
                outputs = inputs
            else:
                outputs[alias : alias + len(inputs)] = inputs
                inputs = outputs
        self._memory = {(Space.INPUT, 0): inputs, (Space.OUTPUT, 0): outputs}
        self._offsets = offsets

    def slice(self, chunk: Chunk) -> tuple[list[int], int, int]:
        """The memory of ``chunk``: a list, and from where to where."""
        space, first, lane, span = chunk
        if space is Space.SCRATCH:
            memory = self._memory.get((space, lane))
            if memory is None:
                memory = self._memory[space, lane] = [_NOTHING] * self.plan.input_chunks
            return memory, first, first + span
        start = first + self._offsets[space]
        return self._memory[space, 0], start, start + span

    def cells(self, space: Space) -> list[int]:
        """All terms of the input or the output."""
        count = self.plan.input_chunks if space is Space.INPUT else self.plan.output_chunks
        memory, start, stop = self.slice(Chunk(space, 0, 0, count))
        return memory[start:stop]


class _Run:
    """All ranks, and the messages between them. A round of a rank ends when all its messages have met."""

    def __init__(self, plans: Sequence[Plan], root: int, is_in_place: bool) -> None:
        self.plans, self.root = plans, root
        self.verb, self.n = plans[0].verb, len(plans)
        self.whole = max(max(plan.input_chunks, plan.output_chunks) for plan in plans)
        self.part = self.whole if self.verb in _WHOLE else self.whole // self.n  # chunks of the smaller buffer
        self.terms = Terms()
        self.ranks: list[_Rank] = []
        for rank, plan in enumerate(plans):
            if (plan.verb, plan.rank, plan.world_size) != (self.verb, rank, self.n):
                raise PlanError(f"rank {rank} has the plan of {plan.verb} of rank {plan.rank} of {plan.world_size}")
            contributions = [self.terms.contribution(rank, chunk) for chunk in range(plan.input_chunks)]
            is_aliased = is_in_place and self.verb not in ("all_to_all_single", "barrier")
            alias = None if not is_aliased else 0 if self.verb in _WHOLE else rank * self.part
            self.ranks.append(_Rank(plan, contributions, alias))
        # Messages whose other side is not there yet: (from, to) -> (round, chunk, terms; None if it is a receive).
        self.posted: dict[tuple[int, int], deque[tuple[int, Chunk, list[int] | None]]] = defaultdict(deque)

    def go(self) -> None:
        """Runs until every rank is through its plan."""
        ready = deque(range(self.n))
        while ready:
            number = ready.popleft()
            rank = self.ranks[number]
            if rank.round >= 0:
                self._act(number)
            rank.round += 1
            if rank.round < len(rank.plan.rounds):
                ready.extend(self._post(number))
        stuck = [number for number, rank in enumerate(self.ranks) if rank.round < len(rank.plan.rounds)]
        if stuck:
            raise self._deadlock(stuck)
        left = next((pair for pair, messages in self.posted.items() if messages), None)
        assert left is None, "a rank that is through its plan waits for nothing"

    def error(self, rank: int, number: int, problem: str) -> PlanError:
        """The error that names the place."""
        return PlanError(f"plan of {self.verb} for {self.n} ranks: rank {rank}, round {number}: {problem}")

    def _post(self, number: int) -> list[int]:
        """Puts up the messages of the round that ``number`` enters; returns the ranks whose rounds that ends."""
        rank = self.ranks[number]
        transfers = rank.plan.rounds[rank.round].transfers
        if not transfers:
            return [number]
        rank.busy_rounds.append(rank.round)
        values: list[list[int] | None] = []
        for transfer in transfers:
            memory, start, stop = rank.slice(transfer.chunk)
            values.append(memory[start:stop] if isinstance(transfer, Send) else None)
        for transfer in transfers:
            key = transfer.peer, isinstance(transfer, Recv)
            rank.waiting[key] = rank.waiting.get(key, 0) + 1
            if isinstance(transfer, Recv):
                memory, start, stop = rank.slice(transfer.chunk)
                if _COMING in memory[start:stop]:
                    raise self.error(number, rank.round, f"two messages come into {transfer.chunk}")
                memory[start:stop] = [_COMING] * (stop - start)
        ended = []
        for transfer, terms in zip(transfers, values):
            if terms is not None:
                self._check_send(number, transfer.chunk, terms)
            ended += self._meet(number, transfer, terms)
        return ended

    def _check_send(self, number: int, chunk: Chunk, terms: list[int]) -> None:
        rank = self.ranks[number]
        memory, start, stop = rank.slice(chunk)
        if _NOTHING in terms:
            raise self.error(number, rank.round, f"sends {chunk}, which holds nothing yet")
        if memory[start:stop] != terms:
            raise self.error(number, rank.round, f"sends {chunk} while a message comes into it")
        rank.sent_chunks += chunk.span
        rank.sent_messages += 1

    def _meet(self, number: int, transfer: Send | Recv, terms: list[int] | None) -> list[int]:
        """Delivers the message if the other side is there, else puts it up; returns ranks that wait for no more."""
        rank = self.ranks[number]
        pair = (transfer.peer, number) if terms is None else (number, transfer.peer)
        queue = self.posted[pair]
        if not queue or (queue[0][2] is None) == (terms is None):
            queue.append((rank.round, transfer.chunk, terms))
            return []
        other_round, other_chunk, other_terms = queue.popleft()
        if terms is None:
            sent, got, moving = (other_round, other_chunk), (rank.round, transfer.chunk), other_terms
        else:
            sent, got, moving = (rank.round, transfer.chunk), (other_round, other_chunk), terms
        assert moving is not None
        self._deliver(pair, sent, got, moving)
        ended = []
        for one, key in ((number, (transfer.peer, terms is None)), (transfer.peer, (number, terms is not None))):
            waiting = self.ranks[one].waiting
            waiting[key] -= 1
            if not waiting[key]:
                del waiting[key]
                if not waiting:
                    ended.append(one)
        return ended

    def _deliver(
        self, pair: tuple[int, int], sent: tuple[int, Chunk], got: tuple[int, Chunk], terms: list[int]
    ) -> None:
        (source, target), (sent_round, sent_chunk), (got_round, got_chunk) = pair, sent, got
        if sent_round != got_round:
            raise self.error(
                source, sent_round, f"sends {sent_chunk} to rank {target}, which receives it in round {got_round}"
            )
        if self._size(source, sent_chunk) != self._size(target, got_chunk):
            raise self.error(
                source,
                sent_round,
                f"sends {sent_chunk} to rank {target}, which takes it for {got_chunk}, of other size",
            )
        receiver = self.ranks[target]
        memory, start, stop = receiver.slice(got_chunk)
        memory[start:stop] = terms
        if got_chunk.space is Space.OUTPUT:
            for index in range(got_chunk.first, got_chunk.first + got_chunk.span):
                receiver.written[index] = got_round, source

    def _size(self, rank: int, chunk: Chunk) -> tuple[int, ...]:
        """What the size of ``chunk`` depends on: chunks of one buffer are not equally large, nor are splits."""
        if self.verb == "all_to_all_single":
            return (chunk.first, rank, chunk.span) if chunk.space is Space.OUTPUT else (rank, chunk.first, chunk.span)
        return chunk.first % self.part, chunk.span

    def _act(self, number: int) -> None:
        """Runs the local actions of the round that has ended."""
        rank = self.ranks[number]
        for action in rank.plan.rounds[rank.round].local:
            inputs = action.inputs if isinstance(action, Reduce) else (action.input,)
            if any(self._size(number, chunk) != self._size(number, action.output) for chunk in inputs):
                raise self.error(number, rank.round, f"{action} is of pieces of different size")
            columns = []
            for chunk in inputs:
                memory, start, stop = rank.slice(chunk)
                columns.append(memory[start:stop])
                if _NOTHING in columns[-1]:
                    raise self.error(number, rank.round, f"{action} reads {chunk}, which holds nothing yet")
            results = []
            for terms in zip(*columns):
                result = self.terms.sum_of(terms)
                if isinstance(result, str):
                    raise self.error(number, rank.round, result)
                results.append(result)
            memory, start, stop = rank.slice(action.output)
            memory[start:stop] = results

    def _deadlock(self, stuck: list[int]) -> PlanError:
        """Words what the stuck ranks wait for; names first one that waits for a rank that is through its plan."""
        waits = []
        for number in stuck:
            rank = self.ranks[number]
            peer, is_receive = next(iter(rank.waiting))
            other = self.ranks[peer]
            is_over = other.round >= len(other.plan.rounds)
            what = f"waits for a message from rank {peer}" if is_receive else f"waits for rank {peer} to receive"
            why = "which is through its plan: the message is lost" if is_over else f"which is in round {other.round}"
            waits.append((not is_over, f"rank {number}, round {rank.round}: {what}, {why}"))
        waits.sort()
        kind = "a message without its other side" if not waits[0][0] else "a deadlock"
        listing = "; ".join(text for _, text in waits[:8])
        return PlanError(f"plan of {self.verb} for {self.n} ranks: {kind}: {listing}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def check_outputs(self) -> None:
        """Compares every output chunk with what the collective means."""
        wrong: list[tuple[int, int, str]] = []
        everybody = (1 << self.n) - 1
        first_sums: dict[int, tuple[int, int]] = {}  # chunk -> its sum and the rank that has it
        for number, rank in enumerate(self.ranks):
            got = rank.cells(Space.OUTPUT)
            if len(got) != self._output_chunks(number):
                raise self.error(number, 0, f"expected {self._output_chunks(number)} output chunks, got {len(got)}")
            for index, term in enumerate(got):
                round_, peer = rank.written.get(index, (len(rank.plan.rounds) - 1, number))
                expected = self._expected(number, index)
                if expected is None:
                    continue
                if isinstance(expected, int):
                    if term != expected:
                        problem = f"expected {self._words(expected)}, got {self._words(term)}, from rank {peer}"
                        wrong.append((round_, number, f"output chunk {index}: {problem}"))
                    continue
                if term < 0 or self.terms.ranks[term] != everybody or self.terms.chunk[term] != expected[0]:
                    problem = f"expected the sum of chunk {expected[0]} of all ranks, got {self._words(term)}"
                    wrong.append((round_, number, f"output chunk {index}: {problem}"))
                    continue
                same, owner = first_sums.setdefault(index, (term, number)) if self.verb == "all_reduce" else (term, 0)
                if same != term:
                    problem = f"adds in another order: {self.terms.words(term)}, rank {owner} {self.terms.words(same)}"
                    wrong.append((round_, number, f"output chunk {index}: {problem}"))
        if wrong:
            round_, number, problem = min(wrong)
            raise self.error(number, round_, problem)

    def _output_chunks(self, rank: int) -> int:
        """How many output chunks ``rank`` must have."""
        is_root = rank == self.root
        match self.verb:
            case "reduce" | "gather":
                return self.whole if is_root else 0
            case "broadcast":
                return 0 if is_root else self.whole
            case "reduce_scatter_single" | "scatter":
                return self.part
            case _:
                return self.whole

    def _expected(self, rank: int, index: int) -> int | tuple[int] | None:
        """The contribution that an output chunk must hold, or the chunk, in a tuple, whose sum it must be."""
        match self.verb:
            case "all_reduce" | "reduce":
                return (index,)
            case "reduce_scatter_single":
                return (rank * self.part + index,)
            case "broadcast":
                return self.terms.contribution(self.root, index)
            case "scatter":
                return self.terms.contribution(self.root, rank * self.part + index)
            case "all_to_all_single":
                return self.terms.contribution(index, rank)
            case "barrier":  # hears from everybody else
                return None if index == rank else self.terms.contribution(index, 0)
            case _:
                return self.terms.contribution(index // self.part, index % self.part)

    def _words(self, term: int) -> str:
        return "nothing" if term < 0 else f"{self.terms.words(term)} of chunk {self.terms.chunk[term]}"
