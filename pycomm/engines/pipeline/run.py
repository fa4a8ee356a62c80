"""One step of one rank: goes through the row, action by action."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ...errors import TransportError
from .actions import Action, Kind, Schedule
from .links import Links
from .outcome import Outcome
from .stage import Stage

__all__ = ["Run"]

_Messages = dict[tuple[int, int], torch.Tensor]  # of a (stage, microbatch)


class Run:
    """One step of one rank: what is on its way from action to action."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        links: Links,
        outcome: Outcome,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        """``inputs`` and ``targets`` are the microbatches; empty on ranks without the first, or the last, stage."""
        self._schedule, self._stages, self._links, self._outcome = schedule, stages, links, outcome
        self._inputs, self._targets = inputs, targets
        self._activations: _Messages = {}  # its input
        self._gradients: _Messages = {}  # its output's gradient
        self.action_s: dict[Action, float] = {}
        self._waiting_weights = 0
        self.peak = 0
        self.wall_s = 0.0

    def perform(self, action: Action) -> None:
        """Does one entry of the row. See the note on top of outcome.py for what a rank does once it has failed."""
        kind, stage, microbatch = action
        place = stage, microbatch
        if kind is Kind.RECV_F:
            self._take(self._activations, place, self._links.receive(action))
        elif kind is Kind.RECV_B:
            self._take(self._gradients, place, self._links.receive(action))
        elif kind is Kind.SEND_F:
            self._send(action, self._activations.pop((stage + 1, microbatch), None))
        elif kind is Kind.SEND_B:
            self._send(action, self._gradients.pop((stage - 1, microbatch), None))
        else:
            start_s = time.perf_counter()
            self._attempt(partial(self._compute, action))
            self.action_s[action] = time.perf_counter() - start_s

    def finish(self) -> None:
        """Called at the end of the row; returns if all ranks have come to theirs, else raises on all."""
        if torch.is_grad_enabled():
            for stage in self._stages.values():
                self._attempt(stage.sync_gradients)
        self._links.finish()
        self._outcome.agree()

    def _attempt(self, call: Callable[[], None]) -> None:
        """Makes the call, unless this rank has failed; it has, if the call raises."""
        if self._outcome.has_failed:
            return
        try:
            call()
        except TransportError:
            raise  # nor would the others hear of it
        except Exception as error:
            self._outcome.fail(error)

    def _take(self, messages: _Messages, place: tuple[int, int], got: torch.Tensor | None) -> None:
        if got is None:
            self._outcome.fail()
        else:
            messages[place] = got

    def _send(self, action: Action, tensor: torch.Tensor | None) -> None:
        """A rank that has failed has no tensor, or one that nobody needs."""
        if tensor is not None:
            self._attempt(partial(self._links.check, tensor))
        if tensor is None or self._outcome.has_failed:
            self._links.send_nothing(action)
        else:
            self._links.send(action, tensor)

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
