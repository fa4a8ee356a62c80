"""What the planners know of a model: parameters, and the shape of a transformer that activations follow from.

    parameters of a layer   12 width^2             attention 4 width^2, two-layer network 8 width^2
    of all                  layers * 12 width^2 + vocabulary * width

Of a bare count the shape is assumed: width = 128 layers, as in GPT-3 (Brown et al. 2020, table 2.1), which is what
that table, and Kaplan et al. 2020 (section 3.2: the shape matters little), make the usual one; heads a power of two.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError

__all__ = ["ModelShape", "shape_of"]

_ASPECT = 128  # width / layers
_HEAD_WIDTH = 128
_VOCABULARY = 32_000
_HEADS = ("heads", "num_heads", "n_heads", "n_head")  # what modules call their number of heads


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """``parameters`` in ``layers`` equal layers, and outside of them. ``width`` is that of the residual stream."""

    parameters: int
    layers: int
    width: int
    heads: int
    vocabulary: int = 0
    is_assumed: bool = False

    def __post_init__(self) -> None:
        for name in ("parameters", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"ModelShape: {name}: expected 1 or more, got {getattr(self, name)}")
        if not 0 <= self.vocabulary * self.width <= self.parameters:
            raise ConfigError(
                f"ModelShape: a vocabulary of {self.vocabulary} x width {self.width} is more than all "
                f"{self.parameters} parameters; expected an embedding that is a part of them"
            )

    @property
    def outside_parameters(self) -> int:
        """Those of the embedding, which stand before the first and, tied, after the last layer."""
        return self.vocabulary * self.width

    @property
    def layer_parameters(self) -> int:
        """Those of one layer, rounded up."""
        return -(-(self.parameters - self.outside_parameters) // self.layers)


def shape_of(model: Any, **known: int) -> ModelShape:
    """Returns the shape of ``model``: a ModelShape, a number of parameters, or an ``nn.Module``.

    Of a module the parameters are counted; its layers are the most numerous class of modules that hold others, its
    width the length that most of its norms scale, its heads an attribute of that name; of a module without such layers
    all but the parameters is assumed. ``known`` fields replace what was found or assumed. Raises ConfigError.
    """
    if isinstance(model, ModelShape):
        found = {name: getattr(model, name) for name in model.__dataclass_fields__}
    elif isinstance(model, (int, float)) and not isinstance(model, bool):
        if model < 1 or model != int(model):
            raise ConfigError(f"the number of parameters: expected a whole number, 1 or more, got {model!r}")
        found = _assumed(int(model))
    elif hasattr(model, "parameters") and hasattr(model, "modules"):
        found = _counted(model)
    else:
        raise ConfigError(
            f"the model: expected an nn.Module, a number of parameters or a ModelShape, got {type(model).__name__}"
        )
    unknown = sorted(set(known) - set(ModelShape.__dataclass_fields__))
    if unknown:
        raise ConfigError(f"the model's shape has no {', '.join(unknown)}; expected layers, width, heads or vocabulary")
    return ModelShape(**{**found, **known})


def _assumed(parameters: int) -> dict[str, Any]:
    layers = max(1, round((parameters / (12 * _ASPECT**2)) ** (1 / 3)))
    width = max(1, round((parameters / (12 * layers)) ** 0.5))
    return {
        "parameters": parameters,
        "layers": layers,
        "width": width,
        "heads": 1 << max(0, round(math.log2(max(1.0, width / _HEAD_WIDTH)))),
        "vocabulary": min(_VOCABULARY, parameters // (2 * width)),
        "is_assumed": True,
    }


def _counted(module: Any) -> dict[str, Any]:
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if parameters == 0:
        raise ConfigError("the model has no parameters; expected an nn.Module with some")
    found = _assumed(parameters)
    holders = Counter(
        type(each) for each in module.modules() if each is not module and any(True for _ in each.children())
    )
    repeated = [(number, kind) for kind, number in holders.items() if number > 1 and not _is_container(kind)]
    widths = Counter(
        each.weight.shape[0]
        for each in module.modules()
        if type(each).__name__.endswith(("LayerNorm", "RMSNorm")) and getattr(each, "weight", None) is not None
    )
    embeddings = [each.weight.shape for each in module.modules() if type(each).__name__ == "Embedding"]
    if not repeated or not widths:
        return found
    found["layers"] = max(number for number, _ in repeated)
    found["width"] = width = widths.most_common(1)[0][0]
    told = (getattr(each, name, None) for each in module.modules() for name in _HEADS)
    heads = [each for each in told if isinstance(each, int) and each > 0]
    found["heads"] = heads[0] if heads else max(1, width // _HEAD_WIDTH)
    found["vocabulary"] = max((shape[0] for shape in embeddings if shape[1] == width), default=0)
    found["is_assumed"] = False
    return found


def _is_container(kind: type) -> bool:
    return kind.__name__ in ("Sequential", "ModuleList", "ModuleDict")
