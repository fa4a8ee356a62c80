"""One step of one rank: goes through the row, action by action."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from .actions import Action, Kind, Schedule
from .links import Links
from .stage import Stage

__all__ = ["Run"]


class Run:
    """One step of one rank: what is on its way from action to action."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        links: Links,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        """``inputs`` and ``targets`` are the microbatches; empty on ranks without the first, or the last, stage."""
        self._schedule, self._stages, self._links = schedule, stages, links
        self._inputs, self._targets = inputs, targets
        self._activations: dict[tuple[int, int], torch.Tensor] = {}  # (stage, microbatch) -> its input
        self._gradients: dict[tuple[int, int], torch.Tensor] = {}  # (stage, microbatch) -> its output's gradient
        self.action_s: dict[Action, float] = {}
        self._waiting_weights = 0
        self.peak = 0
        self.wall_s = 0.0

    def perform(self, action: Action) -> None:
        """Does one entry of the row."""
        kind, stage, microbatch = action
        place = stage, microbatch
        if kind is Kind.RECV_F:
            self._activations[place] = self._links.receive(action)
        elif kind is Kind.RECV_B:
            self._gradients[place] = self._links.receive(action)
        elif kind is Kind.SEND_F:
            self._links.send(action, self._activations.pop((stage + 1, microbatch)))
        elif kind is Kind.SEND_B:
            self._links.send(action, self._gradients.pop((stage - 1, microbatch)))
        else:
            start_s = time.perf_counter()
            self._compute(action)
            self.action_s[action] = time.perf_counter() - start_s

    def _compute(self, action: Action) -> None:
        kind, index, microbatch = action
        stage, last = self._stages[index], self._schedule.stages - 1
        if kind is Kind.F:
            given = self._inputs[microbatch] if index == 0 else self._activations.pop((index, microbatch))
            target = self._targets[microbatch] if index == last else None
            output = stage.forward(microbatch, given, target, 1.0 / self._schedule.microbatches)
            if index < last:
                self._activations[index + 1, microbatch] = output
            self.peak = max(self.peak, sum(each.held for each in self._stages.values()) + self._waiting_weights)
        elif kind is Kind.W:
            stage.weights(microbatch)
            self._waiting_weights -= 1
        else:
            gradient = stage.backward(microbatch, self._gradients.pop((index, microbatch), None), kind is Kind.I)
            self._waiting_weights += kind is Kind.I
            if gradient is not None:
                self._gradients[index - 1, microbatch] = gradient
