"""The members of a package by file name: ``transport/shm.py`` is the transport "shm".

A leading underscore means "helper, not a member". Third parties add members by entry point, for example
``[project.entry-points."pycomm.transports"]  ucx = "my_package.ucx"``, or with ``register``.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from types import ModuleType

from .errors import ConfigError

__all__ = ["Registry"]


class Registry:
    """Finds the members of ``package``, and those that other distributions declare in ``entry_point_group``.

    ``noun`` words the errors; ``helpers`` names the modules of the package that are the frame and not members.
    A member of the package itself wins over a third party's of the same name.
    """

    def __init__(self, package: str, entry_point_group: str, noun: str, helpers: frozenset[str] = frozenset()) -> None:
        self.package = package
        self.entry_point_group = entry_point_group
        self.noun = noun
        self.helpers = helpers
        self._registered: dict[str, ModuleType] = {}

    def register(self, name: str, module: ModuleType) -> None:
        """Adds a member for this process; every rank has to. Raises ConfigError if the name is taken."""
        if name in self:
            raise ConfigError(f"{self.noun} {name!r} is there already; choose another name")
        self._registered[name] = module

    def names(self) -> tuple[str, ...]:
        """Returns all names, sorted. Imports no member."""
        third_parties = {entry.name for entry in entry_points(group=self.entry_point_group)}
        return tuple(sorted(self._own_names() | third_parties | set(self._registered)))

    def __contains__(self, name: object) -> bool:
        """Says whether ``name`` is registered. For others' names it looks at all distributions, which takes long."""
        return name in self._own_names() or name in self.names()

    def load(self, name: str) -> ModuleType:
        """Imports and returns the member ``name``. Raises ConfigError, listing the known names, if there is none."""
        if name in self._own_names():
            return importlib.import_module(f"{self.package}.{name}")
        if name in self._registered:
            return self._registered[name]
        for entry in entry_points(group=self.entry_point_group, name=name):
            loaded = entry.load()
            if not isinstance(loaded, ModuleType):
                raise ConfigError(
                    f"{self.noun} {name!r}: entry point {entry.value!r} must name a module, got {loaded!r}"
                )
            return loaded
        raise self.unknown(name)

    def unknown(self, name: object) -> ConfigError:
        """Returns the error for a name that is not registered."""
        return ConfigError(f"unknown {self.noun} {name!r}; known: {', '.join(self.names())}")

    def _own_names(self) -> set[str]:
        package = importlib.import_module(self.package)
        found = {module.name for module in pkgutil.iter_modules(package.__path__)}
        return {name for name in found if not name.startswith("_")} - self.helpers
