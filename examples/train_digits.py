"""Data-parallel training: a convolution net on handwritten digits, with DistributedDataParallel.

Each rank trains on its own share of the images. The wrapper starts all ranks from rank 0's parameters and averages the
gradients during each backward pass, so the ranks stay bit for bit the same.

    pycomm run -n 2 examples/train_digits.py
    torchrun --nproc-per-node 2 examples/train_digits.py
    mpirun -n 2 python examples/train_digits.py
    python examples/train_digits.py                             a world of one
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import pycomm

TARGET_ACCURACY = 0.97
HELD_OUT = 0.2


class DigitNet(nn.Module):
    """Two convolutions, dropout and a linear layer for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.dropout = nn.Dropout(0.3)
        self.linear = nn.Linear(64 * 2 * 2, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``images (batch, 1, 8, 8)`` to scores ``(batch, 10)``."""
        x = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.linear(self.dropout(x.flatten(1)))


def load_data(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns training images and labels, then held-out images and labels; the same split on every rank."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out, training = order.split([int(HELD_OUT * len(order)), len(order) - int(HELD_OUT * len(order))])
    return images[training], labels[training], images[held_out], labels[held_out]


def share_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's rows; every rank gets the same number of them."""
    rank, world_size = pycomm.rank(), pycomm.world_size()
    return tensor[: len(tensor) // world_size * world_size][rank::world_size]


def held_out_accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the share of right answers; the ranks divide the images among them and add up what they found."""
    rank, world_size = pycomm.rank(), pycomm.world_size()
    model.eval()
    with torch.no_grad():
        right = (model(images[rank::world_size]).argmax(1) == labels[rank::world_size]).sum()
    pycomm.all_reduce(right)
    return right.item() / len(labels)


def parameters_are_identical(model: nn.Module) -> bool:
    """Whether every rank holds bit for bit the same parameters."""
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = torch.empty(pycomm.world_size() * own.numel())
    pycomm.all_gather_single(everyone, own)
    return all(torch.equal(own, other) for other in everyone.chunk(pycomm.world_size()))


def train(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, options: argparse.Namespace, progress: Progress
) -> list[float]:
    """Runs ``options.epochs`` epochs over this rank's share of ``images (n, 1, 8, 8)`` and ``labels (n,)``.

    Returns the mean loss of each epoch, over all ranks.
    """
    images, labels = share_of(images), share_of(labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    batch = max(1, options.batch // pycomm.world_size())
    shuffle = torch.Generator().manual_seed(options.seed + pycomm.rank())
    task = progress.add_task("training", total=options.epochs, loss=float("nan"))
    losses = []
    for _ in range(options.epochs):
        total = torch.zeros(2)
        for rows in torch.randperm(len(labels), generator=shuffle).split(batch):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()  # and the gradients are the mean over the ranks
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        schedule.step()
        pycomm.all_reduce(total)
        losses.append((total[0] / total[1]).item())
        progress.update(task, advance=1, loss=losses[-1])
    return losses


def draw_losses(losses: list[float], path: str) -> None:
    """Saves the loss of each epoch as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.semilogy(range(1, len(losses) + 1), losses)
    axes.set(xlabel="epoch", ylabel="training loss", title=f"digits, {pycomm.world_size()} rank(s)")
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> int:
    """Trains, checks and reports; returns 1 if the model missed its accuracy or the ranks drifted apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64, help="images a step, over all ranks (default: 64)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 0.003)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="save the loss curve, for example as digits.png")
    options = parser.parse_args()
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")

    torch.set_num_threads(1)
    group = pycomm.init()
    torch.manual_seed(options.seed + pycomm.rank())
    console = Console(quiet=pycomm.rank() != 0)
    console.print(f"{pycomm.world_size()} rank(s), transport {group.transport.name}")

    train_images, train_labels, test_images, test_labels = load_data(options.seed)
    model = pycomm.DistributedDataParallel(DigitNet())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
    )
    started = time.perf_counter()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        losses = train(model, train_images, train_labels, options, progress)
    elapsed_s = time.perf_counter() - started

    accuracy = held_out_accuracy(model, test_images, test_labels)
    are_identical = parameters_are_identical(model)
    if options.plot is not None and pycomm.rank() == 0:
        draw_losses(losses, options.plot)
        console.print(f"loss curve: {options.plot}")
    console.print(pycomm.monitor.table(f"collectives of rank 0 (of {pycomm.world_size()})"))
    console.print(f"trained {options.epochs} epochs in {elapsed_s:.1f} s")
    console.print(f"parameters identical on all ranks: {'yes' if are_identical else 'NO'}")
    console.print(f"held-out accuracy: {accuracy:.2%} of {len(test_labels)} images (wanted: {TARGET_ACCURACY:.0%})")
    pycomm.finalize()
    return 0 if accuracy >= TARGET_ACCURACY and are_identical else 1


if __name__ == "__main__":
    sys.exit(main())
