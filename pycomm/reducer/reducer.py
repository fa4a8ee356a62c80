"""The reducer: notices gradients as autograd finishes them and sends full buckets, in the same order on every rank.

[Note: one order on every rank]
Gradients arrive in whatever order autograd runs. Bucket k is started only after bucket k - 1, so all ranks make the
same calls in the same order, also if a rank's graph is another one. After the first pass the buckets are laid out again
in the order in which the gradients of rank 0 arrived, so that they then fill up one after the other.

[Note: the end of a pass]
At the end of ``backward()`` the reducer completes the buckets that still lack gradients (a missing one counts as
zeros), so every rank makes all of its calls, whatever its graph was. One small all_reduce then says whether a rank had
parameters without a gradient. So ranks never wait for one that has nothing to send, and an error is everybody's.

[Note: inside a host]
There the cores that would reduce are those that compute: a call in the middle of a pass hides behind nothing, and waits
for whichever rank is behind at that moment. So buckets are filled in the pass, while gradients are in a cache, and sent
at its end, where the ranks wait for one another once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

import pycomm

from ..errors import ConfigError, PycommError
from .bucket import Bucket
from .layout import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES, Slot, assign_buckets
from .planner import IN_LINE_BYTES, BackwardProfile, BucketPlan, measure_link, plan_buckets
from .reduce import Named, Waitable, Wire, refuse, start_mean

__all__ = ["BucketHook", "Reducer", "has_hooks", "lacks_gradients"]

BucketHook = Callable[[Bucket], None]
PROFILED_PASSES = 3  # the first ones are slower: caches, allocators and autotuners warm up
_NAMED = 8  # of the parameters that an error names


class Reducer:
    """Averages the gradients of ``named`` parameters over ``wire.group``, while backward passes run.

    ``bucket_bytes`` None chooses the size by measurement (``planner.py``). ``finds_unused`` allows parameters to lack a
    gradient; for one that lacks it on all ranks see ``_hand_out_to_used``. ``is_static`` says that each pass is like
    the first: then a parameter's gradient may arrive several times (reentrant checkpointing), and the question at the
    end of a pass is asked once. Only each ``passes_per_reduction``-th pass sends what they added up. ``before`` and
    ``after`` are hooks that are called with each bucket.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        wire: Wire,
        *,
        bucket_bytes: int | None = DEFAULT_BUCKET_BYTES,
        first_bucket_bytes: int | None = FIRST_BUCKET_BYTES,
        finds_unused: bool = False,
        is_static: bool = False,
        passes_per_reduction: int = 1,
    ) -> None:
        self.wire = wire
        if not named:
            raise ConfigError(
                "there is no parameter that requires a gradient: nothing to reduce; use the module as it is"
            )
        wire.check_means((name, parameter.dtype) for name, parameter in named)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._keys = self.names
        if wire.compression is not None:
            self._keys = [wire.group.compression.key_of(*each) for each in named]
        self.bucket_bytes = bucket_bytes or (DEFAULT_BUCKET_BYTES if wire.is_async else IN_LINE_BYTES)
        self._first_plan = self.bucket_bytes
        self.bucket_plan: BucketPlan | None = None  # once "auto" has measured
        self.is_enabled = True  # False: gradients only accumulate
        self.finds_unused = finds_unused
        self.is_static = is_static
        self.before: list[BucketHook] = []
        self.after: list[BucketHook] = []
        self.is_reduced = False  # the gradients are the mean; whoever uses them up sets it back
        self.scale = 1.0  # of the mean; join() makes it the mean over the ranks that have data
        self.announce: Callable[[], None] | None = None  # join()'s: called before a pass of a rank that has data
        self.finished_passes = 0
        self._first_bucket_bytes = first_bucket_bytes
        self._is_auto = bucket_bytes is None and wire.is_async
        self._slots = [Slot(p.numel() * p.element_size(), (p.dtype, p.device)) for p in self.parameters]
        self._expected = [1] * len(named)  # gradients of each parameter in a pass
        self._seen = [0] * len(named)  # those of this pass
        self._has_gradient = bytearray(len(named))  # since the last pass that was reduced
        self._profile = BackwardProfile()
        self._relaid_at = 0
        self._is_prepared = False  # by a forward pass, for the next backward pass
        self._is_under_way = False
        self._end: Callable[[], Any] = lambda: None  # what ends the backward pass, a weak reference
        self._passes_per_reduction = passes_per_reduction
        self._passes = 0  # since the last reduction
        self._next = 0  # the bucket to start next
        self._works: list[Waitable] = []
        self._lay_out(list(reversed(range(len(named)))))
        own = weakref.ref(self)  # parameters outlive their reducer, when a module is wrapped again
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(_tell, own, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
        ]
        self._remove_hooks = weakref.finalize(self, _remove, handles)

    def close(self) -> None:
        """Takes the hooks off the parameters; so does the end of this object's life."""
        self._remove_hooks()

    # -- layout -----------------------------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Called by every rank before the forward pass of a step: lays the buckets out again when that is due.

        Returns whether it is the first forward pass since a backward pass has begun.
        """
        is_first, self._is_prepared = not self._is_prepared, True
        self.forget_what_raised()
        if self.finished_passes == self._relaid_at:
            return is_first
        self._relaid_at = self.finished_passes
        group, total = self.wire.group, len(self._slots)
        if self.finished_passes == 1:
            self._lay_out(self._profile.agreed_order(group, total))
        elif self.finished_passes == PROFILED_PASSES and self._is_auto:
            arrivals_s = self._profile.agreed_arrivals_s(group, total)
            self.bucket_plan = plan_buckets(self._slots, arrivals_s, measure_link(self.wire))
            self.bucket_bytes = self.bucket_plan.bucket_bytes
            self._lay_out(sorted(range(total), key=lambda index: arrivals_s[index]))
        self._profile.restart()
        return is_first

    def forget_what_raised(self) -> None:
        """Ends a backward pass that raised in the middle, if there was one: autograd then lets go of its end."""
        if self._is_under_way and self._end() is None:
            self._wait()
            self._is_under_way = False
            self._profile.restart()

    def _lay_out(self, order: Sequence[int]) -> None:
        """Makes the buckets anew; what the gradients are stays."""
        chosen = assign_buckets(self._slots, order, self.bucket_bytes, self._first_bucket_bytes)
        self.buckets = [
            Bucket(place, [(index, self.names[index], self.parameters[index]) for index in indices], self.wire.group)
            for place, indices in enumerate(chosen)
        ]
        self._bucket_of = {entry.number: bucket for bucket in self.buckets for entry in bucket.entries}
        for bucket in self.buckets:
            self._gather(bucket)

    # -- a pass -------------------------------------------------------------------------------------------------------

    def reduce_now(self, *, is_joined: bool = False) -> None:
        """Averages the gradients as they are, outside ``backward()``. Called by every rank.

        ``is_joined``: this rank has nothing to give and takes part for the others' sake.
        """
        self._begin(is_joined)
        self._finish(is_joined)

    @property
    def awaits_backward(self) -> bool:
        """Whether the next backward pass is one to reduce, and has not begun."""
        return self.is_enabled and not (self._is_under_way and self._end() is not None)

    def begin_backward(self) -> None:
        """Called inside ``backward()``, whose end is then that of the pass; without effect once a pass has begun."""
        self.forget_what_raised()
        if self.awaits_backward:
            self._begin()
            end = self._end_of_backward
            self._end = weakref.ref(end)
            Variable._execution_engine.queue_callback(end)

    def arrived(self, index: int) -> None:
        """Autograd has finished the gradient of parameter ``index``. For the hooks."""
        self._has_gradient[index] = 1
        if not self.is_enabled:
            return
        self.begin_backward()
        self._seen[index] += 1
        if self._is_accumulating or (self.is_static and self.finished_passes == 0):
            return  # of a static graph the first pass says how many to expect; its buckets start at the end
        if self._seen[index] != self._expected[index]:
            if self._seen[index] > self._expected[index]:
                raise self._one_too_many(index)
            return
        if self.finished_passes < PROFILED_PASSES:
            self._profile.note(index)
        bucket = self._bucket_of[index]
        bucket.pending -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            self._start(self.buckets[self._next])

    @property
    def _is_accumulating(self) -> bool:
        return self._passes + 1 < self._passes_per_reduction

    def _begin(self, is_joined: bool = False) -> None:
        if self.announce is not None and not is_joined:
            self.announce()
        self._is_prepared = False
        self._is_under_way = True
        self.is_reduced = False
        self._next = 0
        self._seen = [0] * len(self.parameters)
        for bucket in self.buckets:
            bucket.pending = len(bucket.entries)

    def _start(self, bucket: Bucket) -> None:
        self._next += 1
        self._gather(bucket)
        for hook in self.before:
            hook(bucket)
        if self.wire.is_async:
            self._send(bucket)

    def _gather(self, bucket: Bucket) -> None:
        try:
            bucket.gather()
        except ConfigError:
            refuse(self.wire)  # the others may have no such gradient, and wait
            raise

    def _send(self, bucket: Bucket) -> None:
        work = start_mean(
            self.wire, bucket.flat, [Named(self._keys[entry.number], entry.view) for entry in bucket.entries]
        )
        if work is not None:
            self._works.append(work)

    def _end_of_backward(self) -> None:
        if self._is_accumulating:
            self._passes += 1
            self._is_under_way = False
        else:
            self._finish(is_joined=False)

    def _finish(self, is_joined: bool) -> None:
        """Sends what has not been sent and waits for all; see the note on top of this file."""
        for bucket in self.buckets[self._next :]:
            self._start(bucket)
        if not self.wire.is_async:  # see [Note: inside a host]
            for bucket in self.buckets:
                self._send(bucket)
        self._wait()
        self._is_under_way = False
        if self.scale != 1.0:
            for bucket in self.buckets:
                bucket.flat.mul_(self.scale)
        if self.is_static and self.finished_passes == 0:
            self._expected = [max(1, seen) for seen in self._seen]
        if self.finds_unused:
            self._hand_out_to_used(is_joined)
        elif not (self.is_static and self.finished_passes):
            self._check_all_arrived(is_joined)
        self._has_gradient = bytearray(len(self.parameters))
        self.finished_passes += 1
        self._passes = 0
        self.is_reduced = True
        for bucket in self.buckets:
            for hook in self.after:
                hook(bucket)

    def abandon(self) -> None:
        """Forgets a pass that was ended in the middle, on all ranks, wherever each of them was."""
        works, self._works = self._works, []
        for work in works:
            with contextlib.suppress(PycommError):
                work.wait()
        self._is_under_way = False
        self._has_gradient = bytearray(len(self.parameters))
        # As at first: the ranks may have finished different numbers of passes, and laid their buckets out differently.
        self.bucket_bytes, self._expected = self._first_plan, [1] * len(self.parameters)
        self.finished_passes = self._relaid_at = self._passes = 0
        self._profile.restart()
        self._lay_out(list(reversed(range(len(self.parameters)))))

    def _wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

    # -- parameters without a gradient ---------------------------------------------------------------------------------

    def _hand_out_to_used(self, is_joined: bool) -> None:
        """Gives parameters that have a gradient on some rank the mean; others keep what they had.

        Unless something came for these too: of what a compressor kept back in earlier passes, which is sent once.
        """
        is_used = torch.zeros(len(self.parameters), dtype=torch.uint8, device=self.wire.group.control_device)
        if not is_joined:
            is_used.copy_(torch.frombuffer(self._has_gradient, dtype=torch.uint8))
        pycomm.all_reduce(is_used, pycomm.ReduceOp.MAX, self.wire.group)
        for bucket in self.buckets:
            for entry in bucket.entries:
                if entry.parameter.grad is not None:
                    continue
                if is_used[entry.number] or (self.wire.compression is not None and entry.view.any()):
                    entry.parameter.grad = entry.view

    def _check_all_arrived(self, is_joined: bool) -> None:
        """Raises ConfigError on every rank if a parameter had no gradient on one."""
        missing = [] if is_joined else [name for name, has in zip(self.names, self._has_gradient) if not has]
        lacking = torch.tensor([len(missing)], dtype=torch.int32, device=self.wire.group.control_device)
        pycomm.all_reduce(lacking, pycomm.ReduceOp.MAX, self.wire.group)
        if lacking.item() == 0:
            return
        self._has_gradient = bytearray(len(self.parameters))
        everyone: list[Any] = [None] * self.wire.group.world_size
        pycomm.all_gather_object(everyone, missing[:_NAMED], self.wire.group)
        told = [f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(everyone) if names]
        raise lacks_gradients(int(lacking.item()), told)

    def _one_too_many(self, index: int) -> ConfigError:
        return ConfigError(
            f"backward: parameter {self.names[index]!r} got {self._seen[index]} gradients in one pass, expected "
            f"{self._expected[index]}; its bucket may be on its way already. Reentrant checkpointing does that: use "
            f"checkpoint(use_reentrant=False), or static_graph=True if every step is like the first"
        )


def lacks_gradients(most: int, told: Sequence[str]) -> ConfigError:
    """Returns the error for parameters that got no gradient: ``most`` on one rank; ``told``: which, on each."""
    return ConfigError(
        f"backward: up to {most} parameters got no gradient on some ranks ({'; '.join(told)}), expected one for each "
        f"that requires it. If your model does not use all parameters in every step, pass find_unused_parameters=True; "
        f"if it never does, call requires_grad_(False) on them before wrapping"
    )


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether there are hooks on its gradient, of others than reducers: those of an earlier engine do not matter."""
    after = (parameter._post_accumulate_grad_hooks or {}).values()
    is_ours = (isinstance(each, partial) and each.func is _tell for each in after)
    return bool(parameter._backward_hooks) or not all(is_ours)


def _tell(reducer: weakref.ref[Reducer], index: int, _parameter: torch.Tensor) -> None:
    if (found := reducer()) is not None:
        found.arrived(index)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
