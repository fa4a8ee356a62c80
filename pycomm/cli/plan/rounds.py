"""The rounds of a plan as a grid: one row a round, one column a rank, each chunk in its own colour."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...algorithms import Algorithm
from ...algorithms.plan import Chunk, Copy, Plan, Recv, Reduce, Round, Space
from ...algorithms.simulator import Proof, plans_of, prove
from ...errors import ConfigError
from ...topology import Topology

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["COLOURS", "Shown", "busy_rounds", "chunk_name", "colour_of", "show_rounds", "simulated"]

MAX_RANKS = 64
# Eight hues that differ in lightness too (after Okabe and Ito), one a chunk, in turn.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a90f", "#7b5ea7")


class Shown(NamedTuple):
    """A plan of all ranks, proven."""

    name: str
    verb: str
    topology: Topology
    plans: list[Plan]
    proof: Proof


def simulated(algorithm: Algorithm, verb: str, topology: Topology, root: int) -> Shown:
    """Returns the proven plans. Raises PlanError if there are none, ConfigError if they are too many to show."""
    if topology.world_size > MAX_RANKS:
        raise ConfigError(
            f"{topology.world_size} ranks are too many to show; choose {MAX_RANKS} or fewer, or --predict"
        )
    return Shown(
        algorithm.name,
        verb,
        topology,
        plans_of(algorithm, verb, topology, root),
        prove(algorithm, verb, topology, root),
    )


def busy_rounds(shown: Shown) -> list[tuple[int, list[Round]]]:
    """Returns the number of each round in which anything is done, and that round of each rank."""
    rounds = zip(*(plan.rounds for plan in shown.plans), strict=True)
    return [(number, list(each)) for number, each in enumerate(rounds) if any(map(any, each))]


def colour_of(chunk: Chunk) -> str:
    """Returns the colour of the first of the chunks."""
    return COLOURS[chunk.first % len(COLOURS)]


def chunk_name(chunk: Chunk) -> str:
    """Returns "3", or "4-7" for several."""
    return str(chunk.first) if chunk.span == 1 else f"{chunk.first}-{chunk.first + chunk.span - 1}"


def _cell(round_: Round) -> Text:
    from rich.text import Text

    cell = Text()
    for transfer in round_.transfers:
        arrow = "<-" if isinstance(transfer, Recv) else "->"
        cell.append(f"{arrow}{transfer.peer} ", style="dim" if isinstance(transfer, Recv) else "")
        cell.append(chunk_name(transfer.chunk), style=f"bold {colour_of(transfer.chunk)}")
        cell.append("\n")
    for action in round_.local:
        if isinstance(action, Reduce):
            cell.append(" + ", style="dim")
            cell.append(chunk_name(action.output), style=f"bold {colour_of(action.output)}")
            cell.append(" done\n" if action.output.space is Space.OUTPUT else "\n", style="dim")
        elif isinstance(action, Copy):
            cell.append(" = ", style="dim")
            cell.append(chunk_name(action.output), style=f"bold {colour_of(action.output)}")
            cell.append("\n")
    cell.rstrip()
    return cell if cell.plain else Text("·", style="dim")


def show_rounds(console: Console, shown: Shown) -> None:
    """Prints the grid, what was proven, and the order of additions."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    n, proof = shown.topology.world_size, shown.proof
    table = Table(
        title=f"{shown.name}: {shown.verb} of {n} ranks", title_justify="left", box=box.SIMPLE, show_lines=True
    )
    table.add_column("round", justify="right", style="dim")
    for rank in range(n):
        host = f"\nhost {shown.topology.host_of(rank)}" if len(shown.topology.hosts) > 1 else ""
        table.add_column(f"rank {rank}{host}")
    for number, rounds in busy_rounds(shown):
        table.add_row(str(number), *map(_cell, rounds))
    console.print(table)
    console.print(
        Text(
            "->2 1  sends chunk 1 to rank 2    <-2 1  receives it    + 1  adds it to its own    = 1  copies it",
            style="dim",
        )
    )
    chunks = max(max(plan.input_chunks, plan.output_chunks) for plan in shown.plans)
    console.print(
        f"\nThe buffer S is cut into {chunks} chunks. {proof.rounds} rounds; the busiest rank sends "
        f"{proof.counts.sent} S in {max(proof.messages)} messages."
    )
    if proof.sums:
        sums = proof.sums[0] if len(proof.sums[0]) < 100 else proof.sums[0][:97] + "..."
        console.print(f"Chunk 0 becomes {sums}, on every rank that gets it.")
    console.print("Proven by running all ranks: no deadlock, every contribution once, one order of additions.")
