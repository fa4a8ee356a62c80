"""Tensor and sequence parallelism: layers whose weights are cut over the ranks of a group.

functions.py   what is exchanged in the forward pass, and what in the backward pass
layers.py      linear layers, embedding, norm        loss.py     cross entropy of scores that are cut
blocks.py      attention and two-layer network       convert.py  an ordinary module made parallel
cuts.py        layers whose parameters are cut
"""

from __future__ import annotations

from .blocks import TensorParallelAttention, TensorParallelMLP
from .convert import parallelize
from .functions import cut_same, gather_same
from .layers import ColumnParallelLinear, RowParallelLinear, SequenceParallelLayerNorm, VocabParallelEmbedding
from .loss import ParallelCrossEntropy

__all__ = [
    "ColumnParallelLinear",
    "ParallelCrossEntropy",
    "RowParallelLinear",
    "SequenceParallelLayerNorm",
    "TensorParallelAttention",
    "TensorParallelMLP",
    "VocabParallelEmbedding",
    "cut_same",
    "gather_same",
    "parallelize",
]
