"""Pipeline parallelism: every rank holds some stages of the model and goes through its row of a schedule.

    split     the model into stages, by layers, parameters or measured time      (split.py)
    build     the schedule: which rank does what in which order                  (schedules/)
    lower     put the messages in, after checking that it comes to its end       (lower.py)
    run       row by row; a message is received before what needs it             (``Pipeline.step``)

After a step every ``.grad`` of this rank's stages is that of the mean loss over all microbatches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

import pycomm

from ...errors import ConfigError
from ...reducer.reduce import Wire, start_sum
from ...reducer.reducer import Reducer
from .._agreement import check_same_model
from .._buffers import broadcast_tensors
from .._inside import engines_in, groups_of
from .._marks import Holders, mark_holders
from .actions import Action, Kind, Schedule
from .begin import StepCheck
from .links import Links
from .lower import lower
from .outcome import Outcome
from .run import Run
from .schedules import make
from .simulate import StageTimes
from .split import modules_of, split_model
from .stage import LossFunction, Stage

__all__ = ["Pipeline", "StepReport"]

_FORWARD = (Kind.RECV_F, Kind.F, Kind.SEND_F)


class StepReport(NamedTuple):
    """What a step of this rank took: seconds in all and in computing, and the most activations it held.

    ``action_s`` are the seconds of each thing that it computed.
    """

    wall_s: float
    compute_s: float
    peak_activations: int
    action_s: dict[Action, float]

    @property
    def bubble(self) -> float:
        """The share of the time in which this rank did not compute."""
        return 1.0 - self.compute_s / self.wall_s


class Pipeline:
    """Trains ``layers``, cut into stages over the ranks of ``group``, by the schedule ``schedule``.

    Made by every rank with the whole model, equal on all (CollectiveMismatchError tells the first difference); it keeps
    the stages of its rank and starts from rank 0's parameters. A parameter that is used in several stages stays tied:
    its gradients are added up over them.

    - ``loss(output, target)``: the mean over a microbatch, a scalar; computed by the rank of the last stage.
    - ``schedule``: "gpipe", "one_f_one_b", "interleaved_one_f_one_b", "zero_bubble", "zbv", or a ``Schedule``.
    - ``microbatches``: equal parts of a batch, along its first dimension; ``stages_per_rank``: None is the schedule's
      own number, "gpipe" and "interleaved_one_f_one_b" take others.
    - ``split``: "parameters", "time" (needs ``sample``, one microbatch; all measure, rank 0's times decide), or the
      layers of each stage.
    - ``times``: of each stage, for schedules that are built by them; ``measured_times()`` gives them after a step.
    - ``data_group``: the ranks that hold the same stages for other batches (an axis of a mesh); gradients are the mean
      over them, with ``compression`` as of ``pycomm.all_reduce``.
    - ``is_checkpointed``: keep the stages' inputs alone and compute the rest again in the backward pass.

    Raises ConfigError for too few layers or microbatches, PlanError for a schedule that does not come to its end.
    """

    def __init__(
        self,
        layers: nn.Sequential | Sequence[nn.Module],
        loss: LossFunction,
        microbatches: int,
        group: Any = None,
        *,
        schedule: str | Schedule = "one_f_one_b",
        stages_per_rank: int | None = None,
        split: Literal["parameters", "time"] | Sequence[int] = "parameters",
        sample: torch.Tensor | None = None,
        times: Mapping[int, StageTimes] | None = None,
        is_checkpointed: bool = False,
        data_group: Any = None,
        compression: Any = None,
    ) -> None:
        self.group = pycomm.get_group(group)
        whole = nn.Sequential(*modules_of(layers))
        check_same_model(list(whole.named_parameters()), self.group, "Pipeline")
        if isinstance(schedule, str):
            schedule = make(schedule, self.group.world_size, microbatches, stages_per_rank, times)
        _check_schedule(schedule, self.group)
        self.schedule = schedule
        self.lowered = lower(schedule)
        beside = None if data_group is None else pycomm.get_group(data_group)
        cuts = self._cuts(split, whole, schedule.stages, sample, beside)
        parts = split_model(whole, schedule.stages, cuts, sample)
        self._first_layer = {stage: sum(len(part) for part in parts[:stage]) for stage in range(len(parts))}
        self._tied = self._find_tied(parts)
        own, last = schedule.stages_of(self.group.rank), schedule.stages - 1
        split_stages = {action.stage for action in schedule.rows[self.group.rank] if action.kind is Kind.I}
        self.stages = {
            stage: Stage(
                stage,
                parts[stage],
                loss if stage == last else None,
                is_split=stage in split_stages,
                is_checkpointed=is_checkpointed,
            )
            for stage in own
        }
        self._device = next((p.device for p in whole.parameters()), self.group.control_device)
        self._links = Links(self.group, schedule, self._device)
        self._start_from_rank_0(whole)
        self.report: StepReport | None = None
        self._reducer: Reducer | None = None
        if beside is not None:
            self._average_over(beside, compression)
        self._beside = beside
        self._engines = [engine for stage in self.stages.values() for engine in engines_in(stage.module)]
        self._check = StepCheck(schedule, self.stages, self.group, groups_of(self._engines, beside))

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self, inputs: torch.Tensor | None = None, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Runs forward and backward of a batch; returns the mean loss, on every rank.

        ``inputs`` are used where the first stage is, ``targets`` where the last one is; others may pass None. The first
        dimension is divided into equal microbatches. Gradients are added to those that are there, as ``backward()``
        does. Raises ConfigError, on every rank of the pipeline and of those beside it, if that cannot be or if
        parameters are others than at the beginning. What a layer or the loss raises on one rank it raises there, and
        PycommError with it on all others; zero the gradients then, and a later step can be made.
        """
        self._check.agree(inputs, targets, is_training=True)
        earlier = self._set_tied_gradients_aside()
        try:
            run = self._run(inputs, targets, self.lowered.rows[self.group.rank])
        except Exception:
            self._bring_tied_gradients_back(earlier)
            raise
        self.report = StepReport(run.wall_s, sum(run.action_s.values()), run.peak, run.action_s)
        self._add_tied_gradients(earlier)
        if self._reducer is not None:
            self._reducer.reduce_now()
        return self._mean_loss()

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor | None = None, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Runs the forward passes of ``step`` alone, with the stages in eval mode; returns the mean loss."""
        self._check.agree(inputs, targets)
        modules = [module for stage in self.stages.values() for module in stage.module.modules()]
        was = [module.training for module in modules]
        row = [each for each in self.lowered.rows[self.group.rank] if each.kind in _FORWARD]
        try:
            for stage in self.stages.values():
                stage.module.eval()
            self._run(inputs, targets, row)
        finally:
            for module, is_training in zip(modules, was):
                module.training = is_training  # not train(), which reaches the parts that are in eval mode for good
        return self._mean_loss()

    def _run(self, inputs: torch.Tensor | None, targets: torch.Tensor | None, row: Sequence[Action]) -> Run:
        last = self.schedule.stages - 1
        given = self._microbatches(inputs, 0), self._microbatches(targets, last)
        outcome = Outcome(self.group, self._beside, self._engines)
        run = Run(self.schedule, self.stages, self._links, outcome, *given)
        self._links.begin()
        for stage in self.stages.values():
            stage.begin()
        start_s = time.perf_counter()
        try:
            for action in row:
                run.perform(action)
                self._links.advance()
            run.finish()
        except Exception:
            for engine in self._engines:
                engine.abandon()
            raise
        run.wall_s = time.perf_counter() - start_s
        return run

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of this rank's stages, each once, for its optimizer."""
        yield from (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of this rank's stages, each once, with their names in the whole model."""
        seen = set()
        for index, stage in self.stages.items():
            for name, parameter in stage.module.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    layer, _, rest = name.partition(".")
                    yield f"{int(layer) + self._first_layer[index]}.{rest}", parameter

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns this rank's part of the whole model's state, with the whole model's names."""
        state = {}
        for index, stage in self.stages.items():
            for name, value in stage.module.state_dict().items():
                layer, _, rest = name.partition(".")
                state[f"{int(layer) + self._first_layer[index]}.{rest}"] = value
        return state

    def measured_actions(self) -> dict[Action, float]:
        """Returns the seconds of everything that all ranks computed in the last step, for ``simulate``. Collective."""
        actions = [each for row in self.schedule.rows for each in row]
        if self.report is None:
            raise ConfigError("Pipeline: what a step takes was asked for before the first step; call step() first")
        mine = [self.report.action_s.get(each, 0.0) for each in actions]
        taken = torch.tensor(mine, dtype=torch.float64, device=self.group.control_device)
        pycomm.all_reduce(taken, group=self.group)
        return dict(zip(actions, taken.tolist(), strict=True))

    def measured_times(self) -> dict[int, StageTimes]:
        """Returns what F, I and W of each stage took in the last step, the mean over its microbatches. Collective.

        A stage whose schedule has B counts half of it as I and half as W.
        """
        taken = torch.zeros(self.schedule.stages, 3, dtype=torch.float64, device="cpu")
        for (kind, stage, _), seconds in self.measured_actions().items():
            shares = {Kind.F: (1, 0, 0), Kind.B: (0, 0.5, 0.5), Kind.I: (0, 1, 0), Kind.W: (0, 0, 1)}[kind]
            part = torch.tensor(shares, dtype=torch.float64, device="cpu")
            taken[stage] += seconds / self.schedule.microbatches * part
        return {stage: StageTimes(*row) for stage, row in enumerate(taken.tolist())}

    # -- the parts --------------------------------------------------------------------------------------------------

    def _microbatches(self, batch: torch.Tensor | None, stage: int) -> Sequence[torch.Tensor]:
        if stage not in self.stages:
            return ()
        assert batch is not None, "the step's check has seen it"
        return batch.chunk(self.schedule.microbatches)

    def _cuts(
        self, split: Any, whole: nn.Sequential, stages: int, sample: torch.Tensor | None, beside: pycomm.Group | None
    ) -> Literal["parameters"] | Sequence[int]:
        """Returns cuts that are the same on all ranks, also those with other batches: of measured ones, rank 0's.

        All measure, so that what a layer raises is raised on every rank.
        """
        if split != "time":
            return split  # type: ignore[no-any-return]  # checked by split_model
        lengths = [len(part) for part in split_model(whole, stages, "time", sample)]
        cuts = torch.tensor(lengths, dtype=torch.int64, device=self.group.control_device)
        for group in (self.group, *groups_of(engines_in(whole), beside)):
            pycomm.broadcast(cuts, group=group, group_src=0)
        return list(cuts.tolist())

    def _start_from_rank_0(self, whole: nn.Sequential) -> None:
        with torch.no_grad():
            broadcast_tensors([*whole.parameters(), *whole.buffers()], self.group)

    def _average_over(self, group: pycomm.Group, compression: Any) -> None:
        """Takes the parameters of the first rank of ``group``, and averages gradients over it from now on."""
        named = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        check_same_model(named, group, "Pipeline, data_group")
        broadcast_tensors([*self.state_dict().values()], group)
        if named:  # else the stages of this rank, and of those beside it, are frozen
            self._reducer = Reducer(named, Wire.of(group, compression, overlap=False), finds_unused=True)
            self._reducer.is_enabled = False  # a backward pass is one microbatch's; they add up until reduce_now

    def _find_tied(self, parts: Sequence[nn.Module]) -> list[tuple[nn.Parameter, pycomm.Group]]:
        """Returns the trained parameters that this rank shares with others, with their group; called by all ranks.

        Also says on all parameters which ranks hold them.
        """
        holders: dict[nn.Parameter, set[int]] = {}
        for stage, part in enumerate(parts):
            for parameter in part.parameters():
                holders.setdefault(parameter, set()).add(self.schedule.placement[stage])
        tied = []
        for parameter, ranks in holders.items():
            mark_holders(parameter, Holders(self.group.ranks, min(ranks)), self)
            if parameter.requires_grad and len(ranks) > 1:
                found = pycomm.split(0 if self.group.rank in ranks else None, group=self.group)
                if isinstance(found, pycomm.Group):
                    tied.append((parameter, found))
        return tied

    def _set_tied_gradients_aside(self) -> list[torch.Tensor | None]:
        """Returns the gradients of ``_tied`` from earlier steps, which are sums over the holders already."""
        earlier = [parameter.grad for parameter, _ in self._tied]
        for parameter, _ in self._tied:
            parameter.grad = None
        return earlier

    def _bring_tied_gradients_back(self, earlier: Sequence[torch.Tensor | None]) -> None:
        """After a step that raised: what arose in it is not summed over the holders."""
        for (parameter, _), before in zip(self._tied, earlier, strict=True):
            parameter.grad = before

    def _add_tied_gradients(self, earlier: Sequence[torch.Tensor | None]) -> None:
        """Adds what arose in this step, summed over the holders, to the ``earlier`` gradients."""
        for (parameter, group), before in zip(self._tied, earlier, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            start_sum(Wire(group, is_async=False), parameter.grad)
            if before is not None:
                parameter.grad = before.add_(parameter.grad)

    def _mean_loss(self) -> torch.Tensor:
        last = self.schedule.stages - 1
        told = torch.zeros(2, dtype=torch.float64, device=self._device)  # the loss, and whether it is a double
        if last in self.stages:
            losses = self.stages[last].losses
            total = torch.stack(losses).sum()
            told[0], told[1] = total, total.dtype == torch.float64
            losses.clear()
        pycomm.broadcast(told, group=self.group, group_src=self.schedule.placement[last])
        return told[0] if told[1] else told[0].float()


def _check_schedule(schedule: Schedule, group: pycomm.Group) -> None:
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"Pipeline: schedule: expected a name or a Schedule, got {type(schedule).__name__}")
    if schedule.ranks != group.world_size:
        raise ConfigError(
            f"Pipeline: schedule {schedule.name!r} is for {schedule.ranks} ranks, the group has {group.world_size}; "
            f"build it for as many"
        )
