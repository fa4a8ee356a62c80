"""topk: the k elements of largest magnitude -> (indices, values); scatter_add: back into a dense tensor.

- ``topk_``, ``scatter_add_``, and ``scatter_sum_`` for several at once: into memory that is there.
- ``torch.ops.pycomm.topk_`` and ``scatter_add_``: the same as torch operators; inside torch.compile the functions
  above become these by themselves.
- ``topk_reference``, ``scatter_add_reference``: the same in plain torch; the tests hold the kernels to their bits.

[Note: what a selection is]
Elements are ordered by the bits of their magnitude read as an integer, so NaN > infinity > all else: a NaN is sent,
not hidden. Of equal ones the lower index comes first. The k first of that order are chosen, and written in ascending
order of index. With a residual the input is ``flat + residual``; the residual becomes the input with zeros where it was
chosen, so that sent + residual == input holds exactly.

[Note: reusing a threshold]
Gradients change slowly, so the magnitude that cut off the k-th element last time is a good guess for this time
(Ok-Topk, Li and Hoefler, PPoPP 2022, section 3.1.3). ``report`` carries it from call to call. With ``tolerance`` t a
call that finds n elements at or above it accepts (1 - t) k <= n < k: it sends these n, and fills up with zeros at the
last index.
If n is larger, the selection among the n is exact; if it is smaller, or a multiple of k, the whole selection is done
again, exactly. So a call never sends less than (1 - t) k elements, and those are the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import ConfigError
from ._checks import check_dense, check_devices, current_stream, cuts, kernels

__all__ = [
    "TopkReport",
    "read_report",
    "scatter_add_",
    "scatter_add_reference",
    "scatter_sum_",
    "topk_",
    "topk_reference",
    "workspace_bytes",
]


class TopkReport(NamedTuple):
    """What a selection did: ``threshold``, the smallest magnitude sent (0 before the first call); ``selected`` elements
    (the other slots hold zeros); whether they are exactly the k largest.
    """

    threshold: float
    selected: int
    is_exact: bool


def workspace_bytes(numel: int, k: int) -> int:
    """Returns the bytes of the workspace that ``topk_`` wants for these sizes."""
    return int(kernels().topk_workspace_bytes(numel, k))


def topk_(
    indices: torch.Tensor,
    values: torch.Tensor,
    flat: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    report: torch.Tensor | None = None,
    tolerance: float | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Writes the k largest of ``flat (numel,)`` float32 to ``indices (k,)`` int32 and ``values (k,)`` float32.

    1 <= k <= numel < 2**31. With ``residual (numel,)`` float32 the input is ``flat + residual``; see the notes on top.
    ``report (3,)`` int32, zeros before the first call, says what was done (``read_report``) and carries the threshold.
    ``tolerance`` (0 <= t < 1, needs ``report``) allows to reuse it, without it the selection is exact. ``workspace``
    is scratch memory, at least ``workspace_bytes(numel, k)`` uint8, allocated here if it is not given. All are flat, on
    one device, and do not overlap. Raises ConfigError, NativeUnavailableError.
    """
    if torch.compiler.is_compiling():
        torch.ops.pycomm.topk_(indices, values, flat, residual, report, tolerance, workspace)
        return
    k, numel = indices.numel(), flat.numel()
    can_select = 1 <= k <= numel < 1 << 31
    if workspace is None and can_select:
        workspace = torch.empty(workspace_bytes(numel, k), dtype=torch.uint8, device=flat.device)
    if cuts().topk(indices, values, flat, residual, report, tolerance, workspace):
        return
    check_dense("topk", "indices", indices, torch.int32)
    check_dense("topk", "values", values, torch.float32, k)
    check_dense("topk", "flat", flat, torch.float32)
    check_devices("topk", flat, indices=indices, values=values, residual=residual, report=report, workspace=workspace)
    if not can_select:
        raise ConfigError(f"topk: expected 1 <= k <= numel < 2**31, got k = {k} (the length of indices) of {numel}")
    if residual is not None:
        check_dense("topk", "residual", residual, torch.float32, numel)
    if report is not None:
        check_dense("topk", "report", report, torch.int32, 3)
    if tolerance is not None and (report is None or not 0 <= tolerance < 1):
        raise ConfigError(f"topk: a tolerance is at least 0 and below 1 and needs a report, got {tolerance}, {report}")
    assert workspace is not None
    _check_workspace(workspace, numel, k)
    left, told = (0 if tensor is None else tensor.data_ptr() for tensor in (residual, report))
    room = workspace.data_ptr(), workspace.numel() * workspace.itemsize
    with current_stream("topk", flat.device) as stream:
        kernels().topk(
            indices.data_ptr(),
            values.data_ptr(),
            k,
            flat.data_ptr(),
            numel,
            left,
            *room,
            told,
            tolerance,
            stream,
        )


def _check_workspace(given: torch.Tensor, numel: int, k: int) -> None:
    needed = workspace_bytes(numel, k)
    if not given.is_contiguous() or given.numel() * given.itemsize < needed or given.data_ptr() % 8 != 0:
        raise ConfigError(
            f"topk: the workspace is too small, or not aligned: expected {needed} bytes for k = {k} of {numel}, got "
            f"{given.numel() * given.itemsize} at {given.data_ptr():#x}"
        )


def read_report(report: torch.Tensor) -> TopkReport:
    """Returns what ``report (3,)`` says; waits for the GPU if it is there."""
    bits, selected, is_exact = report.tolist()
    threshold = torch.tensor(bits, dtype=torch.int32, device="cpu").view(torch.float32).item()
    return TopkReport(threshold, selected, bool(is_exact))


def scatter_add_(flat: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, *, factor: float = 1.0) -> None:
    """``flat[indices[i]] += values[i] * factor``: ``flat (numel,)``, ``values (k,)`` float32, ``indices (k,)`` int32.

    An index outside ``0 .. numel - 1`` raises ConfigError before anything is added; on a GPU, which is not waited for,
    it turns the whole of ``flat`` to NaN instead. Equal indices add up (on a GPU in any order).
    """
    if torch.compiler.is_compiling():
        torch.ops.pycomm.scatter_add_(flat, indices, values, factor)
        return
    check_dense("scatter_add", "flat", flat, torch.float32)
    check_dense("scatter_add", "indices", indices, torch.int32)
    check_dense("scatter_add", "values", values, torch.float32, indices.numel())
    check_devices("scatter_add", flat, indices=indices, values=values)
    count = indices.numel()
    places = flat.data_ptr(), flat.numel(), indices.data_ptr(), values.data_ptr(), count, factor
    with current_stream("scatter_add", flat.device) as stream:
        if stream is not None:
            flag = torch.empty(1, dtype=torch.int32, device=flat.device)
            kernels().scatter_add_cuda(*places, flag.data_ptr(), stream)
            return
    bad = kernels().scatter_add(*places)
    if bad != count:
        raise _bad_index(indices, bad, flat.numel())


def scatter_sum_(flat: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """``flat (numel,)`` float32 becomes the sum of ``parts``, in their order, with zeros where none says anything.

    A part is what ``topk_`` writes: indices ``(k,)`` int32 in ascending order, values ``(k,)`` float32. It is what
    zeroing ``flat`` and ``scatter_add_`` of each part compute, bit for bit, but on a CPU memory is passed over once.
    Raises ConfigError, before anything is written, for an index outside ``0 .. numel - 1`` or out of order (on a GPU
    as ``scatter_add_``).
    """
    if torch.compiler.is_compiling() or not flat.is_cpu:
        flat.zero_()
        for indices, values in parts:
            scatter_add_(flat, indices, values)
        return
    check_dense("scatter_sum", "flat", flat, torch.float32)
    for indices, values in parts:
        check_dense("scatter_sum", "indices", indices, torch.int32)
        check_dense("scatter_sum", "values", values, torch.float32, indices.numel())
        check_devices("scatter_sum", flat, indices=indices, values=values)
    places = [(indices.data_ptr(), values.data_ptr(), indices.numel()) for indices, values in parts]
    bad = kernels().scatter_sum(flat.data_ptr(), flat.numel(), places)
    if bad is not None:
        raise _bad_index(parts[bad[0]][0], bad[1], flat.numel())


def _bad_index(indices: torch.Tensor, place: int, numel: int) -> ConfigError:
    index = int(indices[place])
    problem = f"outside: expected 0 .. {numel - 1}" if not 0 <= index < numel else "below the one before it"
    return ConfigError(
        f"scatter: index {index} at position {place} is {problem}; the payload is damaged, or made for another tensor"
    )


# -- for torch.compile -------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "pycomm::topk_",
    mutates_args=("indices", "values", "residual", "report", "workspace"),
    schema="(Tensor(a!) indices, Tensor(b!) values, Tensor flat, Tensor(c!)? residual, Tensor(d!)? report, "
    "float? tolerance, Tensor(e!)? workspace) -> ()",
)
def _topk_op(
    indices: torch.Tensor,
    values: torch.Tensor,
    flat: torch.Tensor,
    residual: torch.Tensor | None,
    report: torch.Tensor | None,
    tolerance: float | None,
    workspace: torch.Tensor | None,
) -> None:
    topk_(indices, values, flat, residual=residual, report=report, tolerance=tolerance, workspace=workspace)


@torch.library.custom_op(
    "pycomm::scatter_add_",
    mutates_args=("flat",),
    schema="(Tensor(a!) flat, Tensor indices, Tensor values, float factor) -> ()",
)
def _scatter_add_op(flat: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, factor: float) -> None:
    scatter_add_(flat, indices, values, factor=factor)


# They write to what they are given and return nothing: so does the fake.
_topk_op.register_fake(lambda *arguments: None)
_scatter_add_op.register_fake(lambda *arguments: None)


# -- the references ----------------------------------------------------------------------------------------------------


def topk_reference(
    flat: torch.Tensor,
    k: int,
    *,
    residual: torch.Tensor | None = None,
    threshold: float = 0.0,
    tolerance: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TopkReport]:
    """Returns (indices, values, new residual, report) in plain torch; see the notes on top of this file."""
    inputs = flat if residual is None else flat + residual
    keys = inputs.view(torch.int32) & 0x7FFFFFFF
    above = int((keys >= torch.tensor(threshold, dtype=torch.float32, device=flat.device).view(torch.int32)).sum())
    is_short = tolerance is not None and threshold > 0 and math.ceil((1 - tolerance) * k) <= above < k
    selected = above if is_short else k
    order = torch.sort(keys, descending=True, stable=True).indices[:selected]
    smallest = keys[order[-1]].view(torch.float32).item() if selected else threshold
    indices = torch.full((k,), flat.numel() - 1, dtype=torch.int32, device=flat.device)
    indices[:selected] = order.sort().values.to(torch.int32)
    values = inputs[indices.long()]
    values[selected:] = 0.0
    left = inputs.clone()
    left[indices[:selected].long()] = 0.0
    report = TopkReport(threshold if is_short else smallest, selected, not is_short)
    return indices, values, left, report


def scatter_add_reference(
    flat: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, *, factor: float = 1.0
) -> torch.Tensor:
    """Returns ``flat`` with the values added, in plain torch; raises ConfigError for an index outside."""
    numel = flat.numel()
    bad = (indices < 0) | (indices >= numel)
    if bool(bad.any()):
        raise _bad_index(indices, int(bad.nonzero()[0]), numel)
    scaled = values * torch.tensor(factor, dtype=torch.float32, device=flat.device)
    return flat.clone().index_add_(0, indices.long(), scaled)
