"""The smallest program: every rank brings a tensor, and every rank ends with the sum.

pycomm run -n 4 examples/all_reduce.py            also: mpirun -n 4 python ..., torchrun --nproc-per-node 4 ...
"""

import torch

import pycomm

pycomm.init()
x = torch.full((3,), float(pycomm.rank()))
pycomm.all_reduce(x)
print(f"rank {pycomm.rank()} of {pycomm.world_size()}: {x.tolist()}")
pycomm.finalize()
