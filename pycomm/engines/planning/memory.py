"""What a rank holds of a model in training: bytes by class, for each strategy.

    of P parameters, N ranks             parameters    gradients     optimizer
    DDP                                  p P           g P           o P
    SHARD_OPTIMIZER     (ZeRO-1)         p P           g P           o P / N
    SHARD_GRAD_OP       (ZeRO-2)         p P           g P / N       o P / N
    FULL_SHARD          (ZeRO-3)         p P / N       g P / N       o P / N
    HYBRID_SHARD                         as FULL_SHARD, N the ranks of a host

p, g and o are the bytes a parameter has of each: 4, 4 and 8 with AdamW in float32; 2, 2 and 12 in mixed precision,
where the optimizer also holds a float32 copy. Source: Rajbhandari et al. 2020, ZeRO, sections 3.1 and 5.

    activations of a layer               b s h (4 + 12 / t) elements       kept from its forward to its backward pass
                    computed again       b s h                             its input alone
    scores                               2 b s v / t float32               logits and their logarithms

of b samples of s positions, width h, vocabulary v, over t tensor-parallel ranks: the inputs of two norms and of the two
column-parallel layers are whole on every rank (4), the rest (q, k, v, what attention gives, twice the 4 h of the
network) is cut. It is table 2 of Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer
Models, without dropout and with an attention that keeps no matrix of scores, as torch's.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from ...errors import ConfigError
from .model import ModelShape

__all__ = ["OPTIMIZERS", "PRECISIONS", "STRATEGIES", "Memory", "Precision", "activation_bytes", "state_bytes"]

_T = TypeVar("_T")
STRATEGIES = ("DDP", "SHARD_OPTIMIZER", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")


class Precision(NamedTuple):
    """Bytes an element: of parameters (activations too), gradients, the optimizer's copy, and each of its states."""

    parameter: int
    gradient: int
    copy: int
    state: int


PRECISIONS = {
    "fp32": Precision(4, 4, 0, 4),
    "mixed": Precision(2, 2, 4, 4),  # of ZeRO and Megatron: half precision in front of a float32 optimizer
    "bf16": Precision(2, 2, 0, 2),
}
OPTIMIZERS = {"sgd": 0, "momentum": 1, "adamw": 2}  # states of a parameter


class Memory(NamedTuple):
    """Bytes of a rank. ``gathered`` are the parameters of the layers that FULL_SHARD has together for a while."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        """The bytes of all classes."""
        return sum(self)


def state_bytes(
    parameters: int, strategy: str, ranks: int, precision: str = "fp32", optimizer: str = "adamw"
) -> Memory:
    """Returns the bytes that a rank of ``ranks`` holds of ``parameters``; shards are rounded up. Raises ConfigError.

    The activations are 0. HYBRID_SHARD counts as FULL_SHARD: ``ranks`` are those of a host.
    """
    each = _of(PRECISIONS, precision, "precision")
    states = _of(OPTIMIZERS, optimizer, "optimizer")
    stage = {name: min(place, 3) for place, name in enumerate(STRATEGIES)}
    sharded = _of(stage, strategy, "strategy")
    shard = -(-parameters // ranks)

    def held(is_sharded: bool) -> int:
        return shard if is_sharded else parameters

    return Memory(
        held(sharded >= 3) * each.parameter,
        held(sharded >= 2) * each.gradient,
        held(sharded >= 1) * (each.copy + states * each.state),
    )


def activation_bytes(
    model: ModelShape,
    samples: int,
    length: int,
    *,
    layers: int,
    precision: str = "fp32",
    tp: int = 1,
    in_flight: int = 1,
    is_recomputing: bool = False,
    has_scores: bool = True,
) -> int:
    """Returns the bytes of activations of ``layers`` layers for ``samples`` of ``length``.

    A pipeline holds those of ``in_flight`` microbatches. With ``is_recomputing`` each layer keeps its input, and one
    layer at a time has the rest again. ``has_scores``: the last layer's scores are computed here.
    """
    stream = samples * length * model.width * _of(PRECISIONS, precision, "precision").parameter
    whole = stream * (4 + 12 / tp)
    kept = in_flight * layers * stream + whole if is_recomputing else in_flight * layers * whole
    scores = 2 * samples * length * model.vocabulary / tp * 4 if has_scores else 0
    return round(kept + scores)


def _of(table: dict[str, _T], name: str, what: str) -> _T:
    if name not in table:
        raise ConfigError(f"{what}: expected one of {', '.join(table)}, got {name!r}")
    return table[name]
