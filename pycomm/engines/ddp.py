"""Data parallelism: every rank has the whole model and a share of the batch; gradients are averaged while they arise.

    parameters   rank 0's, broadcast once                                                     (construction)
    forward      buffers made equal, buckets laid out again when due                          (reducer.prepare)
    backward     each finished gradient counts its bucket down; full buckets go on their way  (reducer/reducer.py)
    end of it    every ``.grad`` is the mean over the ranks; any optimizer may step

After that all ranks hold bit for bit the same parameters, because they got the same gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, SupportsIndex

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import pycomm

from ..errors import ConfigError
from ..reducer.graph import Edges, accumulates
from ..reducer.layout import FIRST_BUCKET_BYTES, bucket_bytes_of
from ..reducer.reduce import Wire, refuse
from ..reducer.reducer import BucketHook, Reducer
from ..sizes import bytes_of
from ._agreement import Roster, check_same_model, trained_parameters
from ._buffers import broadcast_tensors, check_writable, make_equal
from ._inside import mark_engine
from ._join import Join
from ._marks import forget_holders, refuse_cut, shards_of
from ._names import keep_names
from ._norms import norm_of

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(nn.Module):
    """Wraps ``module``: after ``backward()`` the gradients are the mean over the ranks of ``group``.

    Made by every rank, which must have built the same model (CollectiveMismatchError names the first parameter that
    differs, and the ranks); it starts from rank 0's parameters. ``state_dict`` has the module's own names.

    - ``bucket_bytes``: bytes reduced together; a number, a text such as "25MiB", or "auto", which takes the size that
      least exposes communication by the measured speed of the group and the measured backward pass. The first bucket
      has at most ``first_bucket_bytes``, so that the wire has work early.
    - ``buffers``: what the first forward pass of a step does with BatchNorm's statistics and the like: "broadcast" rank
      0's, "average" them, or None: each rank keeps its own.
    - ``compression``: as of ``pycomm.all_reduce``: "bf16", "int4+ef", "auto", ... Gradients stay in their own dtype.
    - ``find_unused_parameters``: parameters may lack a gradient; without one on all ranks a ``.grad`` of None stays
      None, unless a compressor sends what it kept back earlier.
    - ``static_graph``: every step is like the first; allows reentrant checkpointing, saves a question a step.
    - ``overlap``: reduce on the group's thread while backward goes on; None: where the wire leaves the host. Inside a
      host reducing is the work of the same cores and memory: it is done at the end of backward, all at once.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Any = None,
        *,
        bucket_bytes: int | str = "auto",
        first_bucket_bytes: int | str = FIRST_BUCKET_BYTES,
        buffers: Literal["broadcast", "average"] | None = "broadcast",
        compression: Any = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        overlap: bool | None = None,
    ) -> None:
        super().__init__()
        if buffers not in ("broadcast", "average", None):
            raise ConfigError(f"buffers: expected 'broadcast', 'average' or None, got {buffers!r}")
        sharded = [name for name, each in module.named_parameters() if shards_of(each) is not None]
        if sharded:
            raise ConfigError(
                f"DistributedDataParallel: expected a module that is not sharded, got one with shards of "
                f"{', '.join(sharded[:4])}, whose gradients come by their engine; take strategy='hybrid_shard' there"
            )
        self.module = module
        self.group = pycomm.get_group(group)
        self.buffers_mode = buffers
        check_same_model(list(module.named_parameters()), self.group, "DistributedDataParallel", by_memory=True)
        check_writable(module.named_buffers())
        self.reducer = Reducer(
            trained_parameters(module),
            Wire.of(self.group, compression, overlap),
            bucket_bytes=bucket_bytes_of(bucket_bytes),
            first_bucket_bytes=bytes_of(first_bucket_bytes, "first_bucket_bytes"),
            finds_unused=find_unused_parameters,
            is_static=static_graph,
        )
        self._roster = Roster(module.named_parameters)
        self._join: Join | None = None
        self.sync_parameters()
        keep_names(self)
        mark_engine(module, self)
        forget_holders(module.parameters())

    @property
    def wires(self) -> Sequence[Wire]:
        """How gradients travel, as the engines around this one ask."""
        return [self.reducer.wire]

    def abandon(self) -> None:
        """Forgets a pass that was ended in the middle, of which all ranks know. For engines around this one."""
        self.reducer.abandon()

    # -- a step -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; with gradients enabled, after making it ready for a backward pass.

        In ``eval()`` mode nothing is agreed on: a rank may evaluate alone.
        """
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if self.module.training:
            self._prepare()
        else:
            self._check_none_is_left_out()
        output = self.module(*args, **kwargs)
        if any(parameter.requires_grad for parameter in self.reducer.parameters):
            self._watch(output)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watch(self, output: Any) -> None:
        """The backward pass begins at the output: inside reentrant checkpoints there are others, with other ends."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                # Not the node itself, which would then hold itself. A parameter that is returned tells of itself.
                tensor.register_hook(partial(self._begins, tensor.grad_fn.next_functions))  # type: ignore[no-untyped-call]

    def _begins(self, edges: Edges, _gradient: torch.Tensor) -> None:
        if self.reducer.awaits_backward and accumulates(edges):
            self.reducer.begin_backward()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare(self) -> None:
        self._check_unchanged()
        source = 0
        if self._join is not None:
            source = self._join.announce_forward(self.reducer.is_enabled)
        if self.reducer.is_enabled:
            self.prepare_step(source)

    def prepare_step(self, source: int, *, is_joined: bool = False) -> None:
        """What all ranks do together before a forward pass; buffers are rank ``source``'s, or the mean of those of the
        ranks that have data: not of this one, if it ``is_joined``.

        Not those of a second one before ``backward()``, where autograd may yet need what the first one had.
        """
        if self.reducer.prepare():
            share = 0.0 if is_joined else self.reducer.scale
            make_equal(self.module.buffers(), self.buffers_mode, self.group, source, share)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients only accumulate; the next backward pass outside averages the sums.

        Around forward and backward of all micro-batches but the last.
        """
        was, self.reducer.is_enabled = self.reducer.is_enabled, False
        try:
            yield
        finally:
            self.reducer.is_enabled = was

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Around a training loop in which ranks have different numbers of steps.

        A rank whose loop has ended takes part in the others' steps with nothing to give; gradients are the mean over
        the ranks that still have data. At the end all have the parameters of the rank that trained longest.
        """
        self._join = Join(self)
        self.reducer.announce = self._join.announce_reduction
        try:
            yield
            self._join.follow_the_others()
        finally:
            self._join = self.reducer.announce = None
            self.reducer.scale = 1.0

    def sync_gradients(self) -> None:
        """Averages the gradients as they are now. Called by every rank; for loops that stay inside ``no_sync``."""
        self.reducer.reduce_now()

    def sync_parameters(self, group_src: int = 0) -> None:
        """Copies the parameters and buffers of one rank to all. Called by every rank."""
        with torch.no_grad():
            broadcast_tensors([*self.module.parameters(), *self.module.buffers()], self.group, group_src)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients down to a 2-norm of at most ``max_norm`` over all parameters; returns the norm it was.

        Alike on all ranks after ``backward()``, whose results are equal; inside ``no_sync`` it is this rank's own. A
        parameter whose ``.grad`` is None has no part in it. Raises ConfigError for parameters that are cut.
        """
        advice = "call pycomm.clip_grad_norm_(model.parameters(), max_norm, tensor=...) with their group"
        refuse_cut(self.reducer.parameters, "DistributedDataParallel.clip_grad_norm_", advice)
        gradients = [each for bucket in self.reducer.buckets for each in bucket.gradients()]
        if not gradients:
            return torch.zeros((), dtype=torch.float32, device=self.reducer.parameters[0].device)
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm_of(each) for each in gradients]))
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if not factor >= 1.0:  # NaN too, which then is in all of them, as in torch
            for gradient in gradients:
                gradient.mul_(factor)
        return norm

    def register_bucket_hook(self, *, before: BucketHook | None = None, after: BucketHook | None = None) -> None:
        """Calls ``before(bucket)`` when a bucket of this rank's gradients is about to be reduced, and ``after(bucket)``
        once it holds the mean.

        ``bucket.flat`` may be changed in place, alike on all ranks in ``after``. ``before`` runs inside ``backward()``.
        """
        if before is not None:
            self.reducer.before.append(before)
        if after is not None:
            self.reducer.after.append(after)

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise ConfigError(
            "a DistributedDataParallel cannot be copied or pickled: it has a group, which is this process's place "
            "among the ranks; copy its .module, for an average of the parameters for example, or save its state_dict()"
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _check_none_is_left_out(self) -> None:
        unfrozen = self._roster.unfrozen()
        if unfrozen:
            raise ConfigError(
                f"forward, in eval() mode: parameters were unfrozen since DistributedDataParallel was made, and their "
                f"gradients would not be averaged: {unfrozen}. Wrap the module again, or evaluate in torch.no_grad()"
            )

    def _check_unchanged(self) -> None:
        change = self._roster.change()
        if not change:
            return
        refuse(self.reducer.wire)
        raise ConfigError(
            f"forward: the module's parameters are not those that DistributedDataParallel was made with: {change}. "
            f"Wrap the module again after changing it"
        )
