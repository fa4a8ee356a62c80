"""Before a step: every rank can make it, or all say why not.

A rank that cannot begin would leave the others waiting for its activations. So all tell each other, in one small
all_reduce along the pipeline, and one along the ranks beside it that hold the same stages for other batches: those of
``data_group``, and of layers that are engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import pycomm

from ...errors import ConfigError
from .._agreement import Roster
from .actions import Schedule
from .stage import Stage

__all__ = ["StepCheck"]


class StepCheck:
    """What a step needs: a batch that the microbatches divide, as many targets as inputs, the same parameters."""

    def __init__(
        self, schedule: Schedule, stages: Mapping[int, Stage], group: pycomm.Group, beside: Sequence[pycomm.Group]
    ) -> None:
        """``stages`` are those of this rank of ``group``; ``beside`` are the groups of the other batches."""
        self._schedule, self._stages, self._group, self._beside = schedule, stages, group, beside
        self._roster = Roster(self._parameters)

    def agree(self, inputs: torch.Tensor | None, targets: torch.Tensor | None, *, is_training: bool = False) -> None:
        """Returns if all ranks can begin; raises ConfigError, on every rank, with what each of them lacks."""
        last = self._schedule.stages - 1
        mistakes = [
            self._of_batch(inputs, "inputs", 0), self._of_batch(targets, "targets", last), self._of_parameters(),
            "gradients are off, by torch.no_grad(); call evaluate() for the loss alone"
            if is_training and not torch.is_grad_enabled() else "",
        ]  # fmt: skip
        mistake = "; ".join(filter(None, mistakes))
        rows = [0 if batch is None or stage not in self._stages or batch.dim() == 0 else len(batch)
                for batch, stage in ((inputs, 0), (targets, last))]  # fmt: skip
        told = torch.tensor([bool(mistake), *rows], dtype=torch.int64, device=self._group.control_device)
        pycomm.all_reduce(told, pycomm.ReduceOp.MAX, self._group)
        is_wrong, given, wanted = told.tolist()
        if not is_wrong and given != wanted:
            is_wrong, mistake = True, f"{given} rows of inputs and {wanted} of targets"
        anywhere = torch.tensor([bool(is_wrong)], dtype=torch.int64, device=self._group.control_device)
        for beside in self._beside:
            pycomm.all_reduce(anywhere, pycomm.ReduceOp.MAX, beside)
        if not anywhere.item():
            return
        everyone: list[Any] = [None] * self._group.world_size
        pycomm.all_gather_object(everyone, mistake, self._group)
        mine = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(everyone) if each)
        raise ConfigError(f"Pipeline.step: {mine or 'a rank with another batch cannot make the step; see its error'}")

    def _of_batch(self, batch: torch.Tensor | None, what: str, stage: int) -> str:
        number = self._schedule.microbatches
        if stage not in self._stages or (batch is not None and batch.dim() and len(batch) and not len(batch) % number):
            return ""
        got = "None" if batch is None else f"shape {tuple(batch.shape)}"
        return f"{what}: holds stage {stage} and expected a batch that {number} microbatches divide, got {got}"

    def _of_parameters(self) -> str:
        change = self._roster.change()
        if not change:
            return ""
        return (
            f"the parameters are not those that Pipeline was made with: {change}; make the Pipeline again after "
            f"changing them"
        )

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [
            (f"stage {index}: {name}", p)
            for index, stage in self._stages.items()
            for name, p in stage.module.named_parameters()
        ]
