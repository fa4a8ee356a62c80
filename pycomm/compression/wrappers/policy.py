"""A compressor for each layer: what is small, or a norm or bias, goes as it is; the rest by ``inner``, or by a rule.

Biases and the weights of norms are vectors: few bytes, and large errors in them hurt most. So do small tensors pay more
for the codec than they save.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError
from ...sizes import whole_number
from ..base import Compressor, Part
from ..none import NoCompression
from ._base import Wrapper

__all__ = ["Policy", "make"]


@dataclass(eq=False)
class Policy(Wrapper):
    """Compresses by ``inner`` the tensors of ``min_numel`` elements or more and ``min_dim`` dimensions or more.

    ``rules`` maps patterns of names (``"embed*"``, as in fnmatch) to other compressors; the first that fits decides.
    Without names every tensor is judged by its shape alone.
    """

    inner: Compressor
    min_numel: int = 2048
    min_dim: int = 2
    rules: Mapping[str, Compressor] = field(default_factory=dict)

    name = "policy"
    sees_shapes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.min_numel, "policy: min_numel", 0)
        whole_number(self.min_dim, "policy: min_dim", 0)
        for pattern, compressor in self.rules.items():
            if not isinstance(compressor, Compressor) or isinstance(compressor, Policy):
                raise ConfigError(f"policy: rule {pattern!r}: expected a compressor, got {compressor!r}")
        self.is_stateful = any(each.is_stateful for each in self._all())

    @property
    def spec(self) -> str:
        rules = "".join(f",{pattern}->{compressor.spec}" for pattern, compressor in self.rules.items())
        return f"{self.inner.spec}+policy:min_numel={self.min_numel},min_dim={self.min_dim}{rules}"

    @property
    def is_for_vectors(self) -> bool:  # type: ignore[override]
        return bool(self.rules) or (self.min_dim < 2 and self.inner.is_for_vectors)

    def routes(self, parts: Sequence[Part]) -> list[tuple[Compressor, list[int]]]:
        chosen: dict[int, tuple[Compressor, list[int]]] = {}
        for index, part in enumerate(parts):
            compressor = self._choose(part)
            chosen.setdefault(id(compressor), (compressor, []))[1].append(index)
        return list(chosen.values())

    def calls_of(self, parts: Sequence[Part]) -> tuple[int, ...]:
        chosen = [each.calls_of([parts[index] for index in indices]) for each, indices in self.routes(parts)]
        return sum(chosen, ())

    def _choose(self, part: Part) -> Compressor:
        for pattern, compressor in self.rules.items():
            if part.model_name is not None and fnmatch.fnmatchcase(part.model_name, pattern):
                return compressor
        is_small = part.numel < self.min_numel or len(part.shape) < self.min_dim
        return _NONE if is_small else self.inner

    def _all(self) -> list[Compressor]:
        return [self.inner, *self.rules.values()]

    def _entries(self) -> set[str]:
        return set(self.rules)

    def _own_state(self) -> dict[str, Any]:
        return {pattern: compressor.state_dict() for pattern, compressor in self.rules.items()}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        for pattern, compressor in self.rules.items():
            compressor.load_state_dict(state[pattern])


_NONE = NoCompression()

make = Policy
