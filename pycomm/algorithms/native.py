"""Runs a collective that the transport carries whole: one call of the transport's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..transport.base import Meanwhile, Transport
    from .executor import Collective

__all__ = ["run_native"]


def run_native(
    transport: Transport, call: Collective, timeout_s: float | None, agree: Callable[[Meanwhile | None], bool]
) -> None:
    """Calls the transport's own collective, after ``agree(meanwhile)``: the ranks' comparison of it, or all of it.

    The asserts state what ``collectives`` has made sure of.
    """
    if call.verb == "all_reduce":
        assert call.output is not None and call.input is not None and call.op is not None
        transport.all_reduce_agreed(agree, call.output, call.input, call.op, call.factor, timeout_s)
        return
    if agree(None):
        return
    match call.verb:
        case "barrier":
            transport.barrier(timeout_s)
        case "broadcast":
            assert call.output is not None
            transport.broadcast(call.output, call.root, timeout_s)
        case "gather":
            assert call.input is not None
            transport.gather(call.output, call.input, call.root, timeout_s)
        case "scatter":
            assert call.output is not None
            transport.scatter(call.output, call.input, call.root, timeout_s)
        case "all_gather_single":
            assert call.output is not None and call.input is not None
            transport.all_gather_single(call.output, call.input, timeout_s)
        case "all_to_all_single":
            assert call.output is not None and call.input is not None
            transport.all_to_all_single(call.output, call.input, call.output_splits, call.input_splits, timeout_s)
        case _:
            _run_reduction(transport, call, timeout_s)


def _run_reduction(transport: Transport, call: Collective, timeout_s: float | None) -> None:
    assert call.input is not None and call.op is not None
    # Only the root of a reduce has an output; the transport writes none elsewhere, so the input may stand in for it.
    output = call.input if call.output is None else call.output
    match call.verb:
        case "reduce":
            transport.reduce(output, call.input, call.op, call.factor, call.root, timeout_s)
        case "reduce_scatter_single":
            transport.reduce_scatter_single(output, call.input, call.op, call.factor, timeout_s)
        case _:
            raise AssertionError(f"no transport call for {call.verb}")
