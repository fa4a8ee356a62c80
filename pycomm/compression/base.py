"""The contract of a compressor: what it puts on the wire, and how the ranks' payloads combine.

[Note: compressor contract]
- A **codec** is the mathematics: ``encode`` writes a payload, ``decode`` reads one. It works on flat float32 tensors
  and keeps nothing between calls (PowerSGD keeps its warm start). ``combine`` says what may be done with payloads, and
  the exchange in ``collectives/compressed.py`` follows from it, so a wrong pairing cannot be written.
- A **wrapper** (``wrappers/``) stands around a codec and has state: error feedback, momentum, a period, a policy.
- **Sizes** of payloads depend on the number of elements (for PowerSGD: on the shapes) alone, never on the data, so no
  rank asks another for a size.
- **Residual.** ``encode(..., residual=r)`` encodes ``flat + r`` and leaves in ``r`` what the payload misses:
  sent + residual == input. What is not finite passes to the result and leaves nothing in the residual.
- **State** is keyed by parameter name (``Part.name``), so it survives another layout of the buckets.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch

from ..errors import CheckpointError, ConfigError

__all__ = [
    "Codec",
    "Combine",
    "Compressor",
    "Context",
    "Message",
    "Part",
    "absorb",
    "check_entries",
    "check_fraction",
    "check_named",
    "keep_finite",
]


class Combine(Enum):
    """How the ranks' payloads merge."""

    SUM = "sum"  # they may be added on the wire
    GATHER = "gather"  # each rank needs all of them
    REQUANTIZE = "requantize"  # encoded chunks are scattered, decoded, added, encoded again and gathered


class Part(NamedTuple):
    """One tensor inside a flat buffer: its ``name``, the key of its state (None: it has none), and its ``shape``."""

    name: str | None
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    @property
    def model_name(self) -> str | None:
        """Its name in its model: the second engine of a group puts ``2:`` in front (``GroupCompression.key_of``)."""
        return None if self.name is None else re.sub(r"^\d+:", "", self.name)


class Context(NamedTuple):
    """What a codec may know of a call.

    ``seed`` is the same on all ranks and another in every call; ``offset`` is where the flat begins in the call's
    buffer, in elements. ``round`` counts the exchanges of a codec with several; ``is_part``: what is decoded is a part
    of a result that no cache will hold; ``kept`` lives as long as the call.
    """

    parts: tuple[Part, ...]
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    offset: int = 0
    round: int = 0
    is_part: bool = False
    kept: dict[str, Any] = {}  # each call passes its own

    @property
    def local_seed(self) -> int:
        """A seed that differs from rank to rank, and from round to round."""
        return (self.seed * 0x9E3779B1 + self.rank * 0x85EBCA77 + self.round * 0xC2B2AE3D + 1) & 0x7FFFFFFF


class Message(NamedTuple):
    """What a compressor wants sent: ``input (numel,)`` by ``codec``; ``residual (numel,)`` takes what it misses."""

    codec: Codec
    input: torch.Tensor
    residual: torch.Tensor | None = None


class Compressor(ABC):
    """What a caller passes as ``compression=``: a codec, or a wrapper around one. See the note on top of this file."""

    name: ClassVar[str]
    is_stateful: bool = False
    needs_total: bool = False  # ``end`` must see the whole sum, so a reduce_scatter has to be an all_reduce
    is_for_shards: bool = True  # ``begin`` treats every element alike, so that a host may add up before it
    is_for_gathers: bool = True  # may encode what is gathered and not summed
    is_for_feedback: bool = True  # what arrives and what it leaves in a residual are the input together
    is_for_vectors: bool = True  # compresses tensors of one dimension too: scatters and gathers have no others
    sees_shapes: bool = False  # what it makes of a tensor depends on its shape, so ranks must agree on that too

    @property
    def spec(self) -> str:
        """The text that ``parse`` makes an equal compressor from; ranks compare it."""
        fields = [field for field in dataclasses.fields(self) if field.init and field.name != "inner"]  # type: ignore[arg-type]
        values = [f"{field.name}={_text(getattr(self, field.name))}" for field in fields]
        return f"{self.name}:{','.join(values)}" if values else self.name

    @property
    @abstractmethod
    def codec(self) -> Codec:
        """What its payloads are made by."""

    def routes(self, parts: Sequence[Part]) -> list[tuple[Compressor, list[int]]]:
        """Returns who compresses which of the parts; by default this compressor, all of them together."""
        return [(self, list(range(len(parts))))]

    def check(self, parts: Sequence[Part]) -> None:
        """Raises ConfigError for parts that this compressor cannot take; called before a byte moves."""
        if self.is_stateful:
            check_named(parts, self.spec)

    def calls_of(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """Returns how many calls ``parts`` have had, where that decides what is sent; the ranks compare it."""
        return ()

    @abstractmethod
    def begin(self, flat: torch.Tensor, context: Context) -> Message | None:
        """Says what to send of ``flat (numel,)``; None: nothing this time, on all ranks alike, and the sum is zero."""

    @abstractmethod
    def end(self, message: Message, total: torch.Tensor, context: Context) -> None:
        """Sees ``total (numel,)``, the sum of what the ranks sent, bit-identical on all of them; may change it alike on
        all."""

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of this rank's state: tensors and numbers, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what ``state_dict`` returned, or ``merge_states`` made of that of several ranks."""
        if state:
            raise ConfigError(
                f"compressor {self.spec!r} keeps no state, got {sorted(state)}; load it where it was saved"
            )

    def __str__(self) -> str:
        return self.spec


class Codec(Compressor):
    """The mathematics of a payload of ``payload_numel(numel, context)`` elements of ``wire_dtype``."""

    combine: Combine
    wire_dtype: torch.dtype = torch.uint8
    rounds: int = 1
    is_elementwise: bool = False  # payload[i] stands for flat[i] alone
    is_sparse: bool = False  # sends some elements exactly, and nothing of the others

    @property
    def codec(self) -> Codec:
        """Itself."""
        return self

    @property
    def for_feedback(self) -> Codec:
        """What encodes the same where a residual takes what is lost, if that must not combine as this does."""
        return self

    def begin(self, flat: torch.Tensor, context: Context) -> Message | None:
        """Sends all of ``flat``."""
        return Message(self, flat)

    def end(self, message: Message, total: torch.Tensor, context: Context) -> None:
        """Leaves the sum as it is."""

    @abstractmethod
    def payload_numel(self, numel: int, context: Context) -> int:
        """Returns the elements of a payload for ``numel`` elements of input."""

    @abstractmethod
    def encode(
        self, payload: torch.Tensor, flat: torch.Tensor, context: Context, residual: torch.Tensor | None = None
    ) -> None:
        """Writes ``payload`` from ``flat (numel,)``, of float32, plus the residual if there is one."""

    @abstractmethod
    def decode(self, flat: torch.Tensor, payload: torch.Tensor, context: Context, add: bool = False) -> None:
        """Writes what ``payload`` says to ``flat (numel,)``, or adds it. Raises TransportError for a damaged one."""

    def decode_sum(self, flat: torch.Tensor, payloads: Sequence[torch.Tensor], context: Context) -> None:
        """Writes the sum of what the ``payloads`` of ranks 0, 1, ... say to ``flat (numel,)``. Raises as ``decode``."""
        context = context._replace(is_part=context.is_part and len(payloads) == 1)
        for rank, payload in enumerate(payloads):
            self.decode(flat, payload, context._replace(rank=rank), add=rank > 0)

    def advance(self, payload: torch.Tensor, context: Context) -> None:
        """Takes the sum of the payloads of one round, before the next ``encode``; for codecs of several rounds."""

    @abstractmethod
    def bound(self, flat: torch.Tensor, world_size: int = 1) -> torch.Tensor:
        """Returns the largest ``|decode(encode(flat)) - flat|`` of each element, ``(numel,)``, for finite input.

        It is inf where a sum that the codec forms is beyond float32: there, not finite numbers may come out.
        """


def absorb(flat: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Returns what is to be encoded: ``flat``, or ``residual`` after ``flat`` was added to it."""
    return flat if residual is None else residual.add_(flat)


def keep_finite(residual: torch.Tensor) -> None:
    """Drops what is not finite from a residual: an inf or NaN has been sent, and must not stay for ever."""
    residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def check_named(parts: Sequence[Part], who: str) -> None:
    """Raises ConfigError unless every part has a name, and no two the same."""
    names = [part.name for part in parts]
    if None in names:
        raise ConfigError(
            f"compression {who!r} keeps state for each tensor and must know which this is: pass name='...', "
            f"for example the parameter's name, the same in every step and on every rank"
        )
    if len(set(names)) != len(names):
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        raise ConfigError(f"compression {who!r}: the names {twice} occur twice in one call; expected one tensor a name")


def check_fraction(who: str, name: str, value: object) -> None:
    """Raises ConfigError unless the argument ``name`` is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigError(f"{who}: expected {name} in [0, 1), got {value!r}")


def check_entries(state: object, expected: Set[str], who: str) -> None:
    """Raises CheckpointError unless ``state``, of the compressor ``who``, is a dict of the ``expected`` entries."""
    if not isinstance(state, Mapping) or set(state) != expected:
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(
            f"compression {who!r}: expected a state with the entries {sorted(expected)}, got {got}; load it into the "
            f"compressor that saved it"
        )


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)
