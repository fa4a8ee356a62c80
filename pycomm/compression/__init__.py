"""Compression: fewer bytes on the wire. ``base.py`` states the contract; a file here is a codec, one in ``wrappers/``
stands around a codec.

    pycomm.all_reduce(gradient, compression="int8")
    pycomm.all_reduce(gradient, compression="topk:0.01+ef", name="layer1.weight")
    pycomm.all_reduce(gradient, compression=pycomm.compression.error_feedback(pycomm.compression.topk(0.01)), ...)

Every registered name is also a function here that makes the compressor.
"""

from __future__ import annotations

from .base import Codec, Combine, Compressor, Context, Message, Part
from .cast import Cast as cast
from .none import NoCompression as none
from .powersgd import PowerSGD as powersgd
from .qsgd import QSGD as qsgd
from .quantize import Quantize as quantize
from .randomk import RandomK as randomk
from .schedules import by_bandwidth, by_stability
from .sign import Sign as sign
from .spec import CODECS, WRAPPERS, checked_spec, parse
from .state import PaddedName, merge_states
from .ternary import Ternary as ternary
from .threshold import Threshold as threshold
from .topk import TopK as topk
from .wrappers.error_feedback import ErrorFeedback as error_feedback
from .wrappers.every import Every as every
from .wrappers.momentum import MomentumCorrection as momentum
from .wrappers.policy import Policy as policy

__all__ = [
    "CODECS",
    "WRAPPERS",
    "Codec",
    "Combine",
    "Compressor",
    "Context",
    "Message",
    "PaddedName",
    "Part",
    "by_bandwidth",
    "by_stability",
    "cast",
    "checked_spec",
    "error_feedback",
    "every",
    "merge_states",
    "momentum",
    "none",
    "parse",
    "policy",
    "powersgd",
    "qsgd",
    "quantize",
    "randomk",
    "sign",
    "ternary",
    "threshold",
    "topk",
]
