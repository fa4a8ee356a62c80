"""Which strategy trains a model on given ranks: memory and step time of each, and the fastest that fits.

    candidates   DDP, the four sharding strategies, and every dp x tp x pp with tp a divisor of the heads and pp of at
                 most the layers; each also with activations computed again, if it does not fit without
    fits         predicted bytes (memory.py) within the memory of a rank
    chosen       the least predicted time (step_time.py); of those within 2 %, the first: the simplest

The numbers are those of the formulas in these two files: they tell a layout that cannot work from one that can, and
which message a step would wait for. Measure the two or three that lead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...algorithms.cost import Level, LinkModel
from ...errors import ConfigError
from ...sizes import bytes_of, parse_bandwidth, whole_number
from .memory import OPTIMIZERS, PRECISIONS, STRATEGIES, Memory, activation_bytes, state_bytes
from .model import ModelShape, shape_of
from .step_time import Cluster, Layout, StepTime, Work, step_time

__all__ = ["Option", "ParallelismPlan", "layouts", "links_of", "plan_parallelism"]

_CLOSE = 1.02
_GATHERED_LAYERS = 2  # the one in use and the one that is fetched ahead


class Option(NamedTuple):
    """A layout: what a rank holds, what a step takes, whether that fits, and in words why it was chosen, or not."""

    layout: Layout
    memory: Memory
    time: StepTime
    fits: bool
    reason: str = ""


class ParallelismPlan(NamedTuple):
    """All ``options``, the fastest that fit first, then those that do not, the smallest first.

    ``chosen`` is the first, None if nothing fits.
    """

    model: ModelShape
    cluster: Cluster
    work: Work
    memory_bytes: int
    options: tuple[Option, ...]

    @property
    def chosen(self) -> Option | None:
        """The option to take."""
        return self.options[0] if self.options[0].fits else None

    @property
    def reason(self) -> str:
        """Why that one, in a sentence."""
        first = self.options[0]
        return f"{first.layout}: {first.reason}"


def plan_parallelism(
    model: Any,
    memory: int | str,
    hosts: int = 1,
    ranks_per_host: int = 1,
    bandwidths: tuple[float | str, float | str] | LinkModel = ("8GB", "25Gbit"),
    *,
    flops_per_s: float,
    global_batch: int | None = None,
    micro_batch: int = 1,
    length: int = 1024,
    precision: str = "fp32",
    optimizer: str = "adamw",
    activation_bytes_per_sample: int | None = None,
    overlaps_inside: bool = False,
    **known: int,
) -> ParallelismPlan:
    """Returns every way to train ``model`` on ``hosts`` x ``ranks_per_host`` ranks, with the one to take first.

    - ``model``: an ``nn.Module`` (also on the meta device), a number of parameters, or a ``ModelShape``; ``layers=``,
      ``width=``, ``heads=``, ``vocabulary=`` correct what is found or assumed of it (``planning/model.py``).
    - ``memory``: of a rank, bytes or a text such as "24GiB": what is left for tensors.
    - ``bandwidths``: inside a host, of a rank, and of a host's link: bytes a second, or texts such as "25Gbit", with
      latencies of 1 and 5 us; or a ``LinkModel`` of your own.
    - ``flops_per_s``: floating-point operations a second that a rank sustains in this model.
    - ``global_batch``: samples of a step, by default one micro-batch a rank; ``micro_batch``: those that a rank
      computes at once; ``length``: positions of a sample.
    - ``precision``: "fp32", "mixed" or "bf16"; ``optimizer``: "sgd", "momentum" or "adamw".
    - ``activation_bytes_per_sample``: measured ones of the whole model (``planning/peak.py``), for models that are no
      transformers; else by formula.
    - ``overlaps_inside``: inside a host too messages run beside the computation, as between GPUs.

    All ranks that plan with the same numbers plan alike; nothing is measured. Raises ConfigError.
    """
    counts = {"hosts": hosts, "ranks_per_host": ranks_per_host, "micro_batch": micro_batch, "length": length}
    _check(counts if global_batch is None else {**counts, "global_batch": global_batch}, flops_per_s)
    memory_bytes = bytes_of(memory, "plan_parallelism: memory")
    for what, name, table in (("precision", precision, PRECISIONS), ("optimizer", optimizer, OPTIMIZERS)):
        if name not in table:
            raise ConfigError(f"plan_parallelism: {what}: expected one of {', '.join(table)}, got {name!r}")
    shape = shape_of(model, **known)
    cluster = Cluster(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        links=links_of(bandwidths),
        flops_per_s=flops_per_s,
        overlaps_inside=overlaps_inside,
    )
    if global_batch is None:
        global_batch = micro_batch * cluster.ranks
    work = Work(global_batch, micro_batch, length, precision)
    options = []
    for layout in layouts(shape, cluster, global_batch // micro_batch):
        for is_recomputing in (False, True):
            each = layout._replace(is_recomputing=is_recomputing)
            held = _memory(shape, each, work, cluster, optimizer, activation_bytes_per_sample)
            if fits := held.total <= memory_bytes:
                break
        options.append(Option(each, held, step_time(shape, each, work, cluster), fits))
    return ParallelismPlan(shape, cluster, work, memory_bytes, _ranked(options, memory_bytes))


def _check(counts: Mapping[str, Any], flops_per_s: Any) -> None:
    for name, value in counts.items():
        whole_number(value, f"plan_parallelism: {name}", 1)
    if not isinstance(flops_per_s, (int, float)) or not flops_per_s > 0:
        raise ConfigError(f"plan_parallelism: flops_per_s: expected a number above 0, got {flops_per_s!r}")


def links_of(bandwidths: tuple[float | str, float | str] | LinkModel) -> LinkModel:
    """Returns the links of (inside a host, of a host's link), each bytes a second or a text. Raises ConfigError."""
    if isinstance(bandwidths, LinkModel):
        return bandwidths
    rates: list[Any] = []
    if isinstance(bandwidths, Sequence):
        rates = [parse_bandwidth(each) if isinstance(each, str) else each for each in bandwidths]
    if len(rates) != 2 or not all(isinstance(rate, (int, float)) and rate > 0 for rate in rates):
        raise ConfigError(f"plan_parallelism: bandwidths: expected two, in bytes a second, got {bandwidths!r}")
    inside, outside = rates
    link = Level(latency_s=5e-6, bytes_per_s=outside, shared_bytes_per_s=outside)
    return LinkModel(host=Level(latency_s=1e-6, bytes_per_s=inside), rack=link, far=link, message_s=2e-6)


def layouts(model: ModelShape, cluster: Cluster, microbatches: int) -> Iterator[Layout]:
    """Yields the candidates, the simplest first; ``microbatches`` are those of a step over all ranks."""
    ranks = cluster.ranks
    for strategy in STRATEGIES:
        is_pointless = ranks == 1 and strategy != "DDP"
        if not is_pointless and (strategy != "HYBRID_SHARD" or (cluster.hosts > 1 and cluster.ranks_per_host > 1)):
            yield Layout(strategy, ranks)
    for model_ranks in (n for n in range(2, ranks + 1) if ranks % n == 0):
        for tp in (n for n in range(1, model_ranks + 1) if model_ranks % n == 0 and model.heads % n == 0):
            pp, dp = model_ranks // tp, ranks // model_ranks
            if pp <= min(model.layers, max(1, microbatches // dp)):
                yield Layout("DDP", dp, tp, pp)


def _memory(
    model: ModelShape, layout: Layout, work: Work, cluster: Cluster, optimizer: str, measured: int | None
) -> Memory:
    layers = -(-model.layers // layout.pp)
    # Both ends of a pipeline hold the embedding; a rank with both, one layer's work more, once.
    held = -(-(model.layer_parameters * layers + model.outside_parameters) // layout.tp)
    shards = cluster.ranks_per_host if layout.strategy == "HYBRID_SHARD" else layout.dp
    state = state_bytes(min(held, model.parameters), layout.strategy, shards, work.precision, optimizer)
    in_flight = min(layout.pp, work.passes(layout.dp))
    if measured is not None and not layout.is_recomputing:
        activations = -(-measured * work.micro_batch * in_flight // (layout.tp * layout.pp))
    else:
        activations = activation_bytes(
            model, work.micro_batch, work.length, layers=layers, precision=work.precision, tp=layout.tp,
            in_flight=in_flight, is_recomputing=layout.is_recomputing,
        )  # fmt: skip
    gathered = 0
    if layout.strategy in ("FULL_SHARD", "HYBRID_SHARD"):
        largest = max(model.layer_parameters, model.outside_parameters)
        gathered = min(_GATHERED_LAYERS * largest, model.parameters) * PRECISIONS[work.precision].parameter
    return state._replace(activations=activations, gathered=gathered)


def _ranked(options: Sequence[Option], memory_bytes: int) -> tuple[Option, ...]:
    """Returns the options in order, each with its reason."""
    fitting = [option for option in options if option.fits]
    others = sorted((option for option in options if not option.fits), key=lambda option: option.memory.total)
    if not fitting:
        return tuple(option._replace(reason=_excess(option, memory_bytes)) for option in others)
    fastest_s = min(option.time.total_s for option in fitting)
    chosen = next(option for option in fitting if option.time.total_s <= _CLOSE * fastest_s)
    behind = sorted((option for option in fitting if option is not chosen), key=lambda option: option.time.total_s)
    is_tied = chosen.time.total_s > fastest_s or any(o.time.total_s <= _CLOSE * chosen.time.total_s for o in behind)
    why = "the simplest within 2 % of the fastest" if is_tied else "the fastest that fits"
    told = [chosen._replace(reason=f"{why}; {_largest_wait(chosen)}")]
    for option in behind:
        factor = option.time.total_s / chosen.time.total_s
        told.append(option._replace(reason=f"{factor:.2f} x the time; {_largest_wait(option)}"))
    return (*told, *(option._replace(reason=_excess(option, memory_bytes)) for option in others))


def _largest_wait(option: Option) -> str:
    waits = {
        "data-parallel messages": option.time.data_s,
        "tensor-parallel messages": option.time.tensor_s,
        "bubble": option.time.bubble_s,
    }
    name, longest_s = max(waits.items(), key=lambda item: item[1])
    share = longest_s / option.time.total_s
    return f"{share:.0%} of it {name}" if share >= 0.005 else "next to no waiting"


def _excess(option: Option, memory_bytes: int) -> str:
    name, largest = max(option.memory._asdict().items(), key=lambda item: item[1])
    total = option.memory.total
    return f"does not fit: {total / memory_bytes:.2f} x the memory, {largest / total:.0%} of it {name}"
