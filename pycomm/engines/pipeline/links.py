"""Messages between the ranks of a pipeline: activations forward, their gradients back.

Every message has a tag of its own, made of direction, stage and microbatch, so rows of two ranks need not have their
messages in the same order. Shape and dtype of what a stage sends are told once a step, before its first message.
"""

from __future__ import annotations

import torch

import pycomm

from ...errors import ConfigError
from .actions import Action, Kind, Schedule

__all__ = ["Links"]

_MAX_DIMS = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)


class Links:
    """The messages of one rank, on ``group``, by the placement of ``schedule``."""

    def __init__(self, group: pycomm.Group, schedule: Schedule, device: torch.device) -> None:
        self._group, self._schedule, self._device = group, schedule, device
        self._shapes: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}  # of the output of each stage, once known
        self._told: set[int] = set()
        self._sent: list[tuple[pycomm.Work, torch.Tensor]] = []

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Starts to send what ``action``, a SEND_F or SEND_B, names; does not wait."""
        forward = action.kind is Kind.SEND_F
        peer = self._schedule.placement[action.stage + (1 if forward else -1)]
        if forward and action.stage not in self._told:
            self._told.add(action.stage)
            self._shapes[action.stage] = (tuple(tensor.shape), tensor.dtype)
            self._start(_describe(tensor).to(self._device), peer, self._header_tag(action.stage))
        self._start(tensor.contiguous(), peer, self._tag(action))

    def receive(self, action: Action) -> torch.Tensor:
        """Waits for what ``action``, a RECV_F or RECV_B, names and returns it."""
        forward = action.kind is Kind.RECV_F
        peer = self._schedule.placement[action.stage + (-1 if forward else 1)]
        source = action.stage - 1 if forward else action.stage  # whose output this is, or is the gradient of
        if source not in self._shapes:
            header = torch.empty(2 + _MAX_DIMS, dtype=torch.int64, device=self._device)
            pycomm.recv(header, group=self._group, tag=self._header_tag(source), group_src=peer)
            code, dims, *lengths = header.tolist()
            self._shapes[source] = (tuple(lengths[:dims]), _DTYPES[code])
        shape, dtype = self._shapes[source]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        pycomm.recv(tensor, group=self._group, tag=self._tag(action), group_src=peer)
        return tensor

    def advance(self) -> None:
        """Moves messages on that are under way, and lets go of those that have arrived. Never blocks."""
        self._sent = [pair for pair in self._sent if not pair[0].is_completed()]

    def finish(self) -> None:
        """Waits until everything that was sent has arrived; the next step may have other shapes."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            work.wait()
        self._shapes.clear()
        self._told.clear()

    def _start(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self._sent.append((pycomm.isend(tensor, group=self._group, tag=tag, group_dst=peer), tensor))

    def _header_tag(self, stage: int) -> int:
        return 1 + 2 * self._schedule.stages * self._schedule.microbatches + stage

    def _tag(self, action: Action) -> int:
        """Returns the message's number: the receiver's and the sender's action have the same."""
        stage = action.stage + (1 if action.kind is Kind.SEND_F else -1 if action.kind is Kind.SEND_B else 0)
        is_backward = action.kind in (Kind.SEND_B, Kind.RECV_B)
        return 1 + (stage * self._schedule.microbatches + action.microbatch) * 2 + is_backward


def _describe(tensor: torch.Tensor) -> torch.Tensor:
    """Returns dtype, number of dimensions and shape as ``(2 + _MAX_DIMS,)`` int64. Raises ConfigError."""
    if tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIMS:
        raise ConfigError(
            f"Pipeline: a stage gave a tensor of {tensor.dtype} with {tensor.dim()} dimensions to the next; expected "
            f"one of {', '.join(str(dtype) for dtype in _DTYPES)} with at most {_MAX_DIMS}"
        )
    shape = [*tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())]
    return torch.tensor([_DTYPES.index(tensor.dtype), tensor.dim(), *shape], dtype=torch.int64, device="cpu")
