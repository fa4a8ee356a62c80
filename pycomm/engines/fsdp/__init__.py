"""Sharded data parallelism: parameters, gradients and optimizer state are divided over the ranks.

options.py   the strategies, and what the arguments mean        wrap.py      which module is a unit
flat.py      the parameters of a unit as one buffer, a shard of it, its gradient
passes.py    what happens when in a forward and a backward pass
pieces.py    a rank's part of a parameter as boxes, for torch.distributed.checkpoint
state.py     state dicts: sharded and whole                     ledger.py    bytes by class, now and at the peak
fsdp.py      the engine                                         scaler.py    loss scaling: the ranks skip together
"""

from __future__ import annotations

from .fsdp import FullyShardedDataParallel, fully_shard
from .scaler import ShardedGradScaler

__all__ = ["FullyShardedDataParallel", "ShardedGradScaler", "fully_shard"]
