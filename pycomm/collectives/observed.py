"""What a Group offers to those who watch it: hooks after its calls, before them, and around their data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .hooks import DataHook, Hook, StartHook
from .short_cuts import ShortCuts

if TYPE_CHECKING:
    from .call import Call

__all__ = ["Observed"]


class Observed(ShortCuts):
    """The hooks of a group. Attaching one changes which calls may take the transport's short cut."""

    __slots__ = ("_data_hooks", "_hooks", "_start_hooks")
    name: str

    def __init__(self) -> None:
        self._hooks: tuple[Hook, ...] = ()
        self._start_hooks: tuple[StartHook, ...] = ()
        self._data_hooks: tuple[DataHook, ...] = ()

    @property
    def is_observed(self) -> bool:
        """Whether a hook of any kind is attached."""
        return bool(self._hooks or self._start_hooks or self._data_hooks)

    def add_hook(self, hook: Hook) -> None:
        """Calls ``hook(record)`` after every collective of this group from now on, in the thread that ran it."""
        self._hooks = (*self._hooks, hook)
        self._refresh_fast()

    def remove_hook(self, hook: Hook) -> None:
        """Stops calling ``hook``. Raises ConfigError if it is not attached."""
        if hook not in self._hooks:
            raise ConfigError(f"this hook is not attached to group {self.name!r}: {hook!r}")
        hooks = list(self._hooks)
        hooks.remove(hook)
        self._hooks = tuple(hooks)
        self._refresh_fast()

    def add_start_hook(self, hook: StartHook) -> None:
        """Calls ``hook(verb, seq)`` before every collective of this group, in the thread that is to run it.

        What the hook returns, if not None, is called once the collective has ended, also if it has failed. While there
        is one, no call takes the transport's short cut.
        """
        self._start_hooks = (*self._start_hooks, hook)
        self._refresh_fast()

    def remove_start_hook(self, hook: StartHook) -> None:
        """Stops calling ``hook``. Raises ConfigError if it is not attached."""
        if hook not in self._start_hooks:
            raise ConfigError(f"this hook is not attached to group {self.name!r}: {hook!r}")
        self._start_hooks = tuple(each for each in self._start_hooks if each != hook)
        self._refresh_fast()

    def add_data_hook(self, hook: DataHook) -> None:
        """Calls ``hook(collective, is_complete)`` before and after every collective of this group, in its turn, with
        the tensors that it moves.

        While there is one, no call takes the transport's short cut. What it raises ends the call.
        """
        self._data_hooks = (*self._data_hooks, hook)
        self._refresh_fast()

    def remove_data_hook(self, hook: DataHook) -> None:
        """Stops calling ``hook``. Raises ConfigError if it is not attached."""
        if hook not in self._data_hooks:
            raise ConfigError(f"this hook is not attached to group {self.name!r}: {hook!r}")
        self._data_hooks = tuple(each for each in self._data_hooks if each != hook)
        self._refresh_fast()

    @contextlib.contextmanager
    def _told_of(self, verb: str, seq: int) -> Iterator[None]:
        with contextlib.ExitStack() as ends:
            for start in self._start_hooks:
                if (end := start(verb, seq)) is not None:
                    ends.callback(end)
            yield

    def _show_data(self, call: Call, is_complete: bool) -> None:
        for hook in self._data_hooks:
            for collective in call.collectives:
                hook(collective, is_complete)
