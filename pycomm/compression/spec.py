"""The one parser of what a caller may pass as ``compression=``.

    spec      codec [":" arguments] { "+" wrapper [":" arguments] }
    arguments value { "," value }, each "value" or "name=value"; a value is a number, 1%, true, false or a word

    "int8"   "topk:0.01"   "topk:1%,exchange=balanced+ef"   "quantize:int4,rounding=stochastic+ef21+every:4"

The same as a dict, in order: ``{"topk": {"ratio": 0.01}, "ef": {}}``. Short names are in ``ALIASES``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..registry import Registry
from .base import Compressor

__all__ = ["ALIASES", "CODECS", "WRAPPERS", "checked_spec", "make_codec", "make_wrapper", "parse", "text_of"]

CODECS = Registry(
    "pycomm.compression",
    "pycomm.compressions",
    "compression",
    helpers=frozenset({"base", "schedules", "spec", "state", "wrappers"}),
)
WRAPPERS = Registry("pycomm.compression.wrappers", "pycomm.compression_wrappers", "compression wrapper")

# Each short name: the registered one, and its first arguments.
ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("cast", {"format": "bf16"}),
    "fp16": ("cast", {"format": "fp16"}),
    **{name: ("quantize", {"format": name}) for name in ("int8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4")},
    "fp8": ("quantize", {"format": "fp8_e4m3"}),
    "ef": ("error_feedback", {}),
    "ef21": ("error_feedback", {"mode": "ef21"}),
    "dgc": ("momentum", {}),
}


def parse(spec: Any) -> Compressor:
    """Returns the compressor of a text or a dict; a compressor is returned as it is. Raises ConfigError."""
    if isinstance(spec, Compressor):
        return spec
    codec, *wrappers = [_stage(stage) for stage in re.split(r"\+(?=[A-Za-z_])", text_of(spec))]
    compressor = make_codec(*codec)
    for wrapper in wrappers:
        compressor = make_wrapper(compressor, *wrapper)
    return compressor


def text_of(spec: Any) -> str:
    """Returns a text or dict as text. Raises ConfigError for anything else."""
    if isinstance(spec, str) and spec.strip():
        return spec.strip()
    if isinstance(spec, Mapping) and spec:
        stages = []
        for name, arguments in spec.items():
            if not isinstance(arguments, Mapping):
                raise ConfigError(f"compression: expected {{name: {{argument: value}}}}, got {name!r}: {arguments!r}")
            listed = ",".join(f"{key}={value}" for key, value in arguments.items())
            stages.append(f"{name}:{listed}" if listed else str(name))
        return "+".join(stages)
    raise ConfigError(
        f"compression: expected a text such as 'int8' or 'topk:0.01+ef', a dict, or a compressor, got {spec!r}; "
        f"known: auto, {', '.join((*CODECS.names(), *sorted(ALIASES)))}"
    )


def checked_spec(spec: Any) -> Compressor | str:
    """Returns a compressor as it is, a text or dict as text that ``parse`` takes, or "auto". Raises ConfigError."""
    if isinstance(spec, Compressor):
        return spec
    text = text_of(spec)
    if text not in _checked and text != "auto":
        parse(text)
        _checked.add(text)
    return text


_checked: set[str] = set()


def make_codec(name: str, positional: list[Any], named: dict[str, Any]) -> Compressor:
    """Returns the codec ``name`` with these arguments. Raises ConfigError."""
    target, defaults = ALIASES.get(name, (name, {}))
    if target not in CODECS:
        aliases = sorted(alias for alias, (of, _) in ALIASES.items() if of in CODECS.names())
        known = ("auto", *CODECS.names(), *aliases)
        raise ConfigError(f"unknown compression {name!r}; known: {', '.join(known)}")
    return _call(CODECS.load(target).make, name, positional, {**defaults, **named})


def make_wrapper(inner: Compressor, name: str, positional: list[Any], named: dict[str, Any]) -> Compressor:
    """Returns ``inner`` in the wrapper ``name`` with these arguments. Raises ConfigError."""
    target, defaults = ALIASES.get(name, (name, {}))
    if target not in WRAPPERS:
        known = (*WRAPPERS.names(), *sorted(alias for alias, (of, _) in ALIASES.items() if of in WRAPPERS.names()))
        raise ConfigError(f"unknown compression wrapper {name!r}; known: {', '.join(known)}")
    return _call(WRAPPERS.load(target).make, name, [inner, *positional], {**defaults, **named})


def _call(make: Any, name: str, positional: list[Any], named: dict[str, Any]) -> Compressor:
    if positional and name in ALIASES and "format" in ALIASES[name][1]:
        raise ConfigError(
            f"compression {name!r} is a format already: name its arguments, as in '{name}:block_numel=64'"
        )
    try:
        made = make(*positional, **named)
    except TypeError as error:
        raise ConfigError(f"compression {name!r}: {str(error).replace('__init__()', name)}") from error
    if not isinstance(made, Compressor):
        raise ConfigError(f"compression {name!r}: make() must return a pycomm.compression.Compressor, got {made!r}")
    return made


def _stage(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """``"topk:1%,exchange=gather"`` -> ``("topk", [0.01], {"exchange": "gather"})``."""
    name, _, arguments = text.partition(":")
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in filter(None, (each.strip() for each in arguments.split(","))):
        key, equals, value = argument.partition("=")
        if equals:
            named[key.strip()] = _value(value.strip())
        elif named:
            raise ConfigError(f"compression {text!r}: {argument!r} has no name, and stands after arguments with names")
        else:
            positional.append(_value(key))
    return name.strip(), positional, named


def _value(text: str) -> Any:
    if text in ("true", "True", "false", "False"):
        return text in ("true", "True")
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return text
