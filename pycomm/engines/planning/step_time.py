"""What a training step takes, by strategy and layout: computing, waiting for messages, the pipeline's bubble.

    forward of T tokens     T (2 P + 4 layers s h) / (ranks of the model x flops_per_s)      2 P: every weight once
    backward                twice that; computing activations again is one more forward
    source                  Narayanan et al. 2021, Megatron-LM, section 5.1 and appendix; Kaplan et al. 2020, table 1

    a step of m microbatches, of messages    DDP               all_reduce g P
                                             SHARD_OPTIMIZER   reduce_scatter g P, all_gather p P
                                             SHARD_GRAD_OP     m reduce_scatter g P, all_gather p P
                                             FULL_SHARD        m (2 all_gather p P, reduce_scatter g P)
                                             HYBRID_SHARD      that inside a host, m all_reduce g P / ranks of a host
                                                               between hosts
                                             tp                m 4 layers all_reduce of the activations b s h (6 with
                                                               activations computed again); nothing hides them
                                             pp                the schedule one_f_one_b, simulated with its messages
    source                                   ZeRO, section 7; Shoeybi et al. 2019, Megatron-LM, section 3

Messages of data parallelism hide behind the pass that they run beside, where the group leaves the host or the ranks are
GPUs: on the cores of one host they are the same cores' work, and pycomm does not overlap them (``reducer/reduce.py``).
A pipeline reduces when its step is over. The time of a collective is that of the algorithm that the cost model
(``algorithms/cost.py``) finds fastest on these links; groups of one host that communicate at once share its link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...algorithms import find_algorithm
from ...algorithms.cost import LinkModel, predict
from ...topology import Topology
from ..pipeline.schedules import make
from ..pipeline.simulate import StageTimes, simulate
from .memory import PRECISIONS
from .model import ModelShape

__all__ = ["Cluster", "Layout", "StepTime", "Work", "collective_s", "groups_along", "step_time"]

_INSIDE = ("recursive_doubling", "halving_doubling", "ring")
_BETWEEN = ("hierarchical", "ring")
_SEGMENTS = (1, 8, 64)
_SIMULATED_TURNS = 2  # microbatches a rank of the pipeline that are simulated; each further one takes as long


class Layout(NamedTuple):
    """A strategy over ``dp`` data-parallel ranks, each of them ``tp`` x ``pp`` ranks with one model."""

    strategy: str
    dp: int
    tp: int = 1
    pp: int = 1
    is_recomputing: bool = False

    def __str__(self) -> str:
        axes = f"dp={self.dp} tp={self.tp} pp={self.pp}" if self.tp * self.pp > 1 else ""
        return " ".join(filter(None, [axes or self.strategy, "recomputing" if self.is_recomputing else ""]))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """``hosts`` of ``ranks_per_host`` ranks each, their links, and the operations a second that one rank sustains.

    ``overlaps_inside``: messages inside a host run beside the computation, as between GPUs.
    """

    hosts: int
    ranks_per_host: int
    links: LinkModel
    flops_per_s: float
    overlaps_inside: bool = False

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.hosts * self.ranks_per_host


class Work(NamedTuple):
    """A step: ``global_batch`` samples of ``length`` positions, of which a rank takes ``micro_batch`` at once."""

    global_batch: int
    micro_batch: int
    length: int
    precision: str = "fp32"

    def passes(self, dp: int) -> int:
        """Returns how many micro-batches a rank of ``dp`` takes a step."""
        return -(-self.global_batch // (dp * self.micro_batch))


class StepTime(NamedTuple):
    """Seconds of a step: computing; waiting for messages of data and of tensor parallelism; the pipeline's bubble."""

    compute_s: float
    data_s: float
    tensor_s: float = 0.0
    bubble_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The seconds of the whole step."""
        return sum(self)


def step_time(model: ModelShape, layout: Layout, work: Work, cluster: Cluster) -> StepTime:
    """Returns the predicted time of one step."""
    each, passes = PRECISIONS[work.precision], work.passes(layout.dp)
    tokens = work.micro_batch * work.length
    operations = tokens * (2.0 * model.parameters + 4.0 * model.layers * work.length * model.width)
    forward_s = operations / (layout.tp * layout.pp * cluster.flops_per_s)
    backward_s = (3 if layout.is_recomputing else 2) * forward_s
    activation = tokens * model.width * each.parameter
    summed_s = collective_s("all_reduce", groups_along("tp", layout), activation, cluster) if layout.tp > 1 else 0.0
    forward_sums_s = 2 * model.layers / layout.pp * summed_s
    backward_sums_s = (2 if layout.is_recomputing else 1) * forward_sums_s
    compute_s = passes * (forward_s + backward_s)
    tensor_s = passes * (forward_sums_s + backward_sums_s)
    bubble_s = 0.0
    if layout.pp > 1:
        times = StageTimes(forward_s + forward_sums_s, backward_s + backward_sums_s, 0.0)
        links = cluster.links.host if layout.dp * layout.tp < cluster.ranks_per_host else cluster.links.rack
        transfer_s = links.latency_s + activation / layout.tp / links.bytes_per_s
        bubble_s = max(0.0, _pipeline_s(layout.pp, passes, times, transfer_s) - compute_s - tensor_s)
    hiding = (0.0, 0.0) if layout.pp > 1 else (forward_s, backward_s)
    data_s = _data_parallel_s(-(-model.parameters // (layout.tp * layout.pp)), layout, passes, work, cluster, hiding)
    return StepTime(compute_s, data_s, tensor_s, bubble_s)


def _data_parallel_s(
    parameters: int, layout: Layout, passes: int, work: Work, cluster: Cluster, hiding: tuple[float, float]
) -> float:
    """Returns what data parallelism's messages take of a step beyond the passes that they hide in."""
    each = PRECISIONS[work.precision]
    if layout.dp == 1:
        return 0.0
    whole = groups_along("dp", layout)
    forward_s, backward_s = hiding
    if layout.strategy == "DDP":
        return _exposed_s([("all_reduce", each.gradient * parameters)], whole, cluster, backward_s)
    gather, scatter = (
        ("all_gather_single", each.parameter * parameters),
        ("reduce_scatter_single", each.gradient * parameters),
    )
    if layout.strategy == "SHARD_OPTIMIZER":
        return _exposed_s([scatter], whole, cluster, backward_s) + _exposed_s([gather], whole, cluster, forward_s)
    if layout.strategy == "SHARD_GRAD_OP":
        once_s = _exposed_s([gather], whole, cluster, forward_s)
        return once_s + passes * _exposed_s([scatter], whole, cluster, backward_s)
    if layout.strategy == "FULL_SHARD":
        return passes * (
            _exposed_s([gather], whole, cluster, forward_s) + _exposed_s([gather, scatter], whole, cluster, backward_s)
        )
    per_host = cluster.ranks_per_host
    inside = [tuple(range(host * per_host, (host + 1) * per_host)) for host in range(cluster.hosts)]
    across = [tuple(range(local, cluster.ranks, per_host)) for local in range(per_host)]
    inside_s = _exposed_s([gather], inside, cluster, forward_s) + _exposed_s(
        [gather, scatter], inside, cluster, backward_s
    )
    shard = each.gradient * parameters // per_host
    return passes * (inside_s + _exposed_s([("all_reduce", shard)], across, cluster, backward_s))


def _exposed_s(
    calls: Sequence[tuple[str, int]], groups: Sequence[tuple[int, ...]], cluster: Cluster, hiding_s: float
) -> float:
    """Returns what is left of the calls of these (verb, bytes) after a computation of ``hiding_s`` beside them."""
    taken_s = sum(collective_s(verb, groups, nbytes, cluster) for verb, nbytes in calls)
    leaves_host = any(len({rank // cluster.ranks_per_host for rank in group}) > 1 for group in groups)
    return max(0.0, taken_s - hiding_s) if leaves_host or cluster.overlaps_inside else taken_s


def groups_along(axis: str, layout: Layout) -> list[tuple[int, ...]]:
    """Returns the ranks of each group along "dp", "tp" or "pp", as ``Mesh`` lays them out: tp varies fastest."""
    strides = {"tp": 1, "dp": layout.tp, "pp": layout.tp * layout.dp}
    length, stride = getattr(layout, axis), strides[axis]
    firsts = (rank for rank in range(layout.dp * layout.tp * layout.pp) if rank // stride % length == 0)
    return [tuple(range(first, first + length * stride, stride)) for first in firsts]


def collective_s(verb: str, groups: Sequence[tuple[int, ...]], nbytes: int, cluster: Cluster) -> float:
    """Returns the seconds of ``verb`` of ``nbytes`` in all ``groups`` at once, those of the slowest."""
    hosts = [[rank // cluster.ranks_per_host for rank in group] for group in groups]
    leaving = [set(each) for each in hosts if len(set(each)) > 1]
    slowest = 0.0
    shapes = {(Topology.of_hosts(each), max(sum(h in out for out in leaving) for h in each)) for each in hosts}
    for topology, sharing in shapes:
        links = cluster.links
        if sharing > 1:
            links = replace(links, rack=replace(links.rack, shared_bytes_per_s=links.rack.shared_bytes_per_s / sharing))
        slowest = max(slowest, _fastest_s(verb, topology, links, nbytes))
    return slowest


def _fastest_s(verb: str, topology: Topology, links: LinkModel, nbytes: int) -> float:
    if topology.world_size == 1:
        return 0.0
    is_grouped = 1 < len(topology.hosts) < topology.world_size
    named = map(find_algorithm, _BETWEEN if is_grouped else _INSIDE)
    return min(
        predict(each, verb, topology, links, nbytes, segments=segments)
        for each in named
        if each.supports(verb, topology)
        for segments in _SEGMENTS
    )


def _pipeline_s(ranks: int, microbatches: int, times: StageTimes, transfer_s: float) -> float:
    """Returns the seconds of one_f_one_b; in the middle of a long step each further microbatch takes the same."""
    simulated = min(microbatches, _SIMULATED_TURNS * ranks)
    total_s = simulate(make("one_f_one_b", ranks, simulated), times, transfer_s).total_s
    if microbatches == simulated:
        return total_s
    shorter_s = simulate(make("one_f_one_b", ranks, simulated - ranks), times, transfer_s).total_s
    return total_s + (microbatches - simulated) * (total_s - shorter_s) / ranks
