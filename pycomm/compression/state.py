"""Buffers of compressors, keyed by parameter name: they outlive bucket layouts, checkpoints and worlds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import CheckpointError, ConfigError
from .base import Part, check_named

__all__ = ["NamedBuffers", "PaddedName", "merge_states"]


class PaddedName(str):
    """The name of a tensor whose elements from ``numel`` on are padding, of which no state is kept.

    So the state fits the same tensor in a world that pads it otherwise.
    """

    numel: int

    def __new__(cls, name: str, numel: int) -> PaddedName:
        made = super().__new__(cls, name)
        made.numel = numel
        return made


class NamedBuffers:
    """A float32 vector for each parameter, zero at first; contiguous for the parameters that are reduced together.

    What is padding, by a PaddedName, has its place there, but is neither saved nor moved to another layout.

    Not safe for several threads; a group calls its compressors one at a time.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._views: dict[str, torch.Tensor] = {}
        self._wholes: dict[tuple[Part, ...], torch.Tensor] = {}

    def get(self, parts: Sequence[Part], like: torch.Tensor) -> torch.Tensor:
        """Returns the buffer ``(numel,)`` of ``parts``, in their order, on the device of ``like``.

        The same memory as long as the parts stay together; in another layout, their values there. Raises ConfigError
        for parts without a name, and for a part that has another number of elements than before.
        """
        key = tuple(parts)
        whole = self._wholes.get(key)
        if whole is None or whole.device != like.device:
            whole = self._lay_out(parts, like)
            self._drop_wholes(parts)
            self._wholes[key] = whole
        return whole

    def _drop_wholes(self, parts: Sequence[Part]) -> None:
        """Forgets the layouts that have one of ``parts``."""
        names = {part.name for part in parts}
        self._wholes = {
            key: whole for key, whole in self._wholes.items() if names.isdisjoint(each.name for each in key)
        }

    def _lay_out(self, parts: Sequence[Part], like: torch.Tensor) -> torch.Tensor:
        self.check(parts)
        whole = torch.zeros(sum(part.numel for part in parts), dtype=torch.float32, device=like.device)
        for part, view in zip(parts, torch.split(whole, [part.numel for part in parts]), strict=True):
            name, view = str(part.name), view[: _own_numel(part)]
            kept = self._views.get(name)
            if kept is not None:
                view.copy_(kept)
            self._views[name] = view
        return whole

    def check(self, parts: Sequence[Part]) -> None:
        """Raises ConfigError as ``get`` does."""
        check_named(parts, self._who)
        for part in parts:
            kept, numel = self._views.get(str(part.name)), _own_numel(part)
            if kept is not None and kept.numel() != numel:
                raise ConfigError(
                    f"compression {self._who!r}: {str(part.name)!r} has {numel} elements, and had {kept.numel()} when "
                    f"its state was made; use another name, or another compressor, for another tensor"
                )

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def drop(self, parts: Sequence[Part]) -> None:
        """Forgets ``parts``; what was laid out beside them stays."""
        gone = {part.name for part in parts}
        self._views = {name: view for name, view in self._views.items() if name not in gone}
        self._drop_wholes(parts)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns a copy of each parameter's vector, on the CPU."""
        return {name: view.detach().cpu().clone() for name, view in self._views.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces everything by ``state``. Raises CheckpointError unless it has tensors only."""
        odd = {name: type(each).__name__ for name, each in state.items() if not isinstance(each, torch.Tensor)}
        if odd:
            raise CheckpointError(f"compression {self._who!r}: expected a state of tensors, got {odd}; is it damaged?")
        self._wholes = {}
        self._views = {name: tensor.detach().to(torch.float32).clone().view(-1) for name, tensor in state.items()}


def _own_numel(part: Part) -> int:
    """Returns the elements that are no padding."""
    return min(part.name.numel, part.numel) if isinstance(part.name, PaddedName) else part.numel


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Makes one state from those of all ranks of a world, for every rank of a world of another size.

    Each buffer becomes the mean over the ranks, which keeps the mean of what they still owe: after averaging gradients
    over the new world, the same correction arrives. Counters must agree. Raises CheckpointError if they do not, or if
    the states are not of one compressor.
    """
    if not states:
        raise CheckpointError("merge_states: expected the states of all ranks, got none")
    first, *others = states
    if any(set(other) != set(first) for other in others):
        raise CheckpointError(
            f"merge_states: the states have different entries: {[sorted(state) for state in states]}; "
            f"expected those of one compressor on all ranks"
        )
    return {key: _merge(key, [state[key] for state in states]) for key in first}


def _merge(key: str, values: list[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return merge_states(values)
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values).mean(0)
    if any(value != values[0] for value in values):
        raise CheckpointError(f"merge_states: {key!r} differs between the ranks: {values}; are they of one step?")
    return values[0]
