"""What a group runs its collectives by: it chooses the algorithm of a call, and runs it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..transport.base import Transport
from ._agreement import FRAMES, Agreement
from .executor import Collective, Executor
from .native import run_native
from .selection import Choice, Selector

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..transport.base import Meanwhile

__all__ = ["Engine"]


class Engine:
    """The selector and the executor of one group. One thread at a time runs."""

    def __init__(self, transport: Transport, selector: Selector) -> None:
        self.selector = selector
        self.choose = selector.choose
        self._transport = transport
        self.agreement = Agreement(transport)
        self._executor = Executor(transport)

    def run(self, call: Collective, choice: Choice, timeout_s: float | None, is_agreed: bool = False) -> None:
        """Runs ``call`` by ``choice``; returns when the local result is complete.

        Raises the TransportErrors of the transport, and CollectiveMismatchError on every rank if they call different
        things. ``timeout_s`` None means the transport's own. ``is_agreed``: the ranks have compared what
        this call follows from already.
        """
        may_carry = choice.rule is not None and choice.rule.source == "default"
        agree: Callable[[Meanwhile | None], bool] = partial(
            self.agreement.run, call, choice.name, timeout_s, may_carry=may_carry
        )
        if is_agreed and choice.name != FRAMES:
            agree = self._count_call
        if choice.name == FRAMES:
            agree(None)
        elif choice.plan is None:
            run_native(self._transport, call, timeout_s, agree)
        elif not agree(None):
            self._executor.run(choice.plan, call, timeout_s)

    def _count_call(self, _: Meanwhile | None) -> bool:
        if not self._transport.compares_calls:
            self._transport.calls += 1  # which the comparison does
        return False

    def execute(self, call: Collective, algorithm: str | None, timeout_s: float | None) -> None:
        """Chooses as ``Selector.choose`` does, and runs."""
        self.run(call, self.choose(call, algorithm), timeout_s)

    def close(self) -> None:
        """Gives the memory back."""
        self._executor.close()
