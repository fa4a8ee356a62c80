"""What a user may choose for a process group of the backend: ``pg_options=pycomm.torch_backend.Options(...)``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from .. import env
from ..algorithms.tables import parse_rules
from ..compression import parse
from ..config import Config, seconds
from ..errors import ConfigError

__all__ = ["Options", "checked"]

_TORCH_DEFAULT = timedelta(minutes=30)  # torch.distributed's timeout of a group that was given none


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of one process group, equal on all its ranks; a field not given comes from the environment.

    ``transport``: a registered name or "auto" (PYCOMM_TRANSPORT). ``algorithm``: a registered name that serves every
    collective it has a plan for, None leaves the choice to the table (PYCOMM_ALGORITHMS). ``compression``: a text such
    as "int8", for each all_reduce and reduce_scatter of at least 2,048 floating-point numbers with SUM or AVG
    (PYCOMM_TORCH_COMPRESSION); compressors that keep state need names of tensors, which a process group does not know:
    see ``ddp_hook`` and ``compress_fsdp``. ``timeout``: seconds or a timedelta, instead of ``init_process_group``'s
    (PYCOMM_TIMEOUT_S, where that has torch's default). Raises ConfigError if a value cannot be used.
    """

    transport: str = field(default_factory=lambda: str(env.read("PYCOMM_TRANSPORT")))
    algorithm: str | None = None
    compression: Any = field(default_factory=lambda: str(env.read("PYCOMM_TORCH_COMPRESSION")) or None)
    timeout: float | timedelta | None = None

    def __post_init__(self) -> None:
        if self.algorithm is not None:
            if not isinstance(self.algorithm, str):
                raise ConfigError(f"algorithm: expected the name of an algorithm or None, got {self.algorithm!r}")
            parse_rules(self._rule(), "pg_options")
        if self.timeout is not None:
            seconds(self.timeout)
        compressor = None if self.compression in (None, "auto") else parse(self.compression)
        if compressor is not None and compressor.is_stateful:
            raise ConfigError(
                f"compression {self.compression!r} keeps state for each tensor, and a process group is not told which "
                f"tensor it reduces; use pycomm.torch_backend.ddp_hook(model, {self.compression!r}) with DDP, or "
                f"compress_fsdp(model, {self.compression!r}) with FSDP2"
            )
        if compressor is not None and not compressor.is_for_vectors:
            raise ConfigError(
                f"compression {self.compression!r} compresses what has two dimensions or more, and a process group's "
                f"buffers are flat: use another codec, or policy:min_dim=1 around one"
            )

    def config(self, timeout: timedelta) -> Config:
        """Returns the settings of the pycomm group; ``timeout`` is what torch hands over, its default or a choice."""
        config = Config(transport=self.transport)
        if self.timeout is not None:
            config = replace(config, timeout_s=seconds(self.timeout))
        elif timeout != _TORCH_DEFAULT or not env.is_set("PYCOMM_TIMEOUT_S"):
            config = replace(config, timeout_s=seconds(timeout))
        if self.algorithm is not None:
            rules = [self._rule(), config.algorithms]
            config = replace(config, algorithms=";".join(rule for rule in rules if rule))
        return config

    def _rule(self) -> str:
        return f"*  *  *  *  *  {self.algorithm}"

    def of_part(self, asked: Any) -> Options:
        """Returns the options of a group that is split from one with these: ``asked``, or the same if that is None.

        Such a group goes by its parent's transport and algorithm. Raises ConfigError if others are asked for.
        """
        if asked is None:
            return self
        its_options = checked(asked)
        for name in ("transport", "algorithm"):
            mine, its = getattr(self, name), getattr(its_options, name)
            if its not in (mine, getattr(Options(), name)):
                raise ConfigError(
                    f"split_group: opts: expected the {name} of the group that is split, {mine!r}, got {its!r}; leave "
                    f"it out, or make a group by new_group"
                )
        return replace(its_options, transport=self.transport, algorithm=self.algorithm)


def checked(options: Any) -> Options:
    """Returns ``options``. Raises ConfigError if they are of another kind."""
    if isinstance(options, Options):
        return options
    raise ConfigError(
        f"pg_options: expected pycomm.torch_backend.Options(...) or None, got {type(options).__name__}: {options!r}"
    )
