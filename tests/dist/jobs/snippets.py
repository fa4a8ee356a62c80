"""Runs the Python snippets of README.md and docs/ in the ranks that a launcher started, those of a document one after
the other and in one namespace. What they leave to their reader (a model, data, a store) is in ``given``.

Code is compiled with the document's name and lines, so a traceback says where to look.
"""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import pycomm
from pycomm.engines.tensor import parallelize
from pycomm.launch.ports import free_port

ROOT = Path(__file__).parents[3]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDER = Path(sys.argv[1])  # the same on all ranks, and empty
PLACES = {  # in a snippet, and here
    "/var/lib/node_exporter": str(FOLDER),
    '"net.pt"': repr(str(FOLDER / "net.pt")),
    '"/shared/job"': repr(str(FOLDER / "store")),
    '"step100"': repr(str(FOLDER / "step100")),
}


class Block(nn.Module):
    """``x (..., 8)`` to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """``x (batch, 8)`` to scores ``(batch, 4)``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def given() -> dict[str, Any]:
    """Makes what the snippets of one document leave to their reader; the same on every rank."""
    torch.manual_seed(0)
    net = Net()
    batches = [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(2)]
    states: list[Any] = [None] * pycomm.world_size()
    pycomm.all_reduce(torch.ones(64), compression="int8+ef", name="weight")
    pycomm.all_gather_object(states, pycomm.get_group().compression.state_dict())
    return {
        "dist": dist,
        "nn": nn,
        "pycomm": pycomm,
        "torch": torch,
        "Block": Block,
        "Net": Net,
        "batches": batches,
        "blocks": [*net.blocks],
        "embedding": nn.Linear(8, 8),
        "file": io.StringIO(),
        "gradient": torch.randn(4096),
        "group": pycomm.get_group(),
        "head": net.head,
        "inputs": batches[0][0],
        "layers": [Block(), *net.blocks, net.head],
        "loss": nn.functional.cross_entropy,
        "model": net,
        "net": net,
        "next_needed": torch.randn(4),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "sample": batches[0][0],
        "share_of_this_rank": batches,
        "states_of_all_ranks": states,
        "targets": batches[0][1],
    }


def for_faults(names: dict[str, Any]) -> None:
    names |= {"world_size": pycomm.world_size(), "last_step": 2}
    names |= {"t": torch.ones(4), "state": torch.ones(4), "gradients": torch.ones(4)}


def for_injection(names: dict[str, Any]) -> None:
    end(names)
    names["train"] = lambda: pycomm.all_reduce(torch.ones(4))  # once, so nothing fails in the tenth


def for_batches(names: dict[str, Any]) -> None:
    names["draw"] = lambda samples: torch.randn(min(samples, 8), 8)
    names["train_step"] = lambda model, inputs: model(inputs).sum().backward()


def for_layers(names: dict[str, Any]) -> None:
    names |= {"width": 8, "hidden": 16, "mesh": pycomm.Mesh(pp=1, fsdp=2, tp=2)}


def for_clipping(names: dict[str, Any]) -> None:
    mesh, sharded, staged = names["mesh"], Net(), Net()
    for model in (sharded, staged):
        parallelize(model, {"blocks.*.up": "column", "blocks.*.down": "row"}, mesh.group("tp"))
    names["sharded"] = pycomm.FullyShardedDataParallel(sharded, mesh.group("fsdp"), wrap=Block)
    names["pipeline"] = pycomm.Pipeline([*staged.blocks, staged.head], names["loss"], 2, mesh.group("pp"))


def for_torch(names: dict[str, Any]) -> None:
    """Lets torch.distributed meet at a port of its own: a rank that comes early would find the store of the last."""
    if dist.is_initialized():
        dist.destroy_process_group()
    port = [free_port()]
    pycomm.broadcast_object_list(port, 0)
    os.environ["MASTER_PORT"] = str(port[0])


def for_hooks(names: dict[str, Any]) -> None:
    names |= {"ddp_model": nn.parallel.DistributedDataParallel(Net()), "fsdp_model": fully_shard(Net())}


def end(names: dict[str, Any]) -> None:
    pycomm.finalize()


def begin(names: dict[str, Any]) -> None:
    names["group"] = pycomm.init()


def nothing(names: dict[str, Any]) -> None:
    pass


# What is made ready before each snippet of a document, and so how many there are.
BEFORE: dict[str, list[Callable[[dict[str, Any]], None]]] = {
    "docs/compression.md": [nothing, nothing],
    "docs/ddp.md": [nothing, nothing],
    "docs/diagnosis.md": [nothing],
    "docs/fsdp.md": [nothing, for_torch],
    "docs/pipeline.md": [nothing, nothing],
    "docs/planning.md": [nothing, for_batches, nothing, nothing],
    "docs/tensor.md": [for_layers, for_clipping],
    "docs/torch_backend.md": [for_torch, for_torch, for_hooks],
    "docs/faults.md": [for_faults, nothing, for_injection],
    "README.md": [end, begin, nothing, nothing, nothing, nothing],
}


def run(document: str) -> None:
    """Runs the snippets of ``document``."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found, names = list(SNIPPET.finditer(text)), given()
    assert len(found) == len(BEFORE[document]), f"{document} has {len(found)} snippets: what do they need?"
    for snippet, prepare in zip(found, BEFORE[document]):
        source = snippet[1]
        for place, here in PLACES.items():
            source = source.replace(place, here)
        prepare(names)
        exec(compile("\n" * text.count("\n", 0, snippet.start(1)) + source, document, "exec"), names)


def main() -> int:
    """Runs all; returns how many documents failed."""
    torch.set_num_threads(1)
    failed, port = 0, os.environ["MASTER_PORT"]
    for document in sorted(BEFORE):
        if not pycomm.is_initialized():
            pycomm.init()
        try:
            run(document)
            print(f"ran {document}", flush=True)
        except Exception:
            traceback.print_exc()
            failed += 1
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ["MASTER_PORT"] = port
    return failed


if __name__ == "__main__":
    sys.exit(main())
