"""Says how to train a model on given ranks: DDP, FSDP or 3-D, with the memory and step time of each.

pycomm advise 7B --memory 80GiB --hosts 2 --ranks 8 --bandwidth 100Gbit --host-bandwidth 200GB --flops 300T
pycomm advise mypackage.nets:GPT --memory 12GiB --ranks 4          a class or function that makes an nn.Module

Every number is a prediction from formulas (pycomm/engines/planning says which): measure the two or three that lead.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ._arguments import PICTURES, check_output

if TYPE_CHECKING:
    from rich.table import Table

    from ..engines.planning.parallelism import Option, ParallelismPlan

__all__ = ["main", "parse_count"]

_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_SHOWN = 8
_CLASSES = {"parameters": "#4878a8", "gradients": "#8fb8de", "optimizer": "#e0a04c", "activations": "#7fb77e"}
_CLASSES["gathered"] = "#b58ecb"
_TIMES = {"compute": "#b8c2ca", "data": "#4878a8", "tensor": "#d1605e", "bubble": "#e7ca60"}


def parse_count(text: str) -> int:
    """Returns the number that ``text`` means, such as 7B or 1.5M; raises ConfigError if it means none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGBT]?)\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"the number {text!r} is not understood; write it as 125M, 7B or 300T.")
    return round(float(match[1]) * _PREFIXES[match[2].upper()])


def _load(text: str) -> Any:
    """Returns the number of parameters, or what ``module:callable`` makes on the meta device. Raises ConfigError."""
    if ":" not in text:
        return parse_count(text)
    import torch

    name, _, attribute = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(name), attribute)
        with torch.device("meta"):
            model = make()
    except Exception as error:  # of the user's code
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{text}: expected module:callable that makes an nn.Module, got {what}") from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{text}: expected module:callable that makes an nn.Module, got a {type(model).__name__}")
    return model


def _measured_flops() -> float:
    """Returns the operations a second of float32 matrix products on the cores that this process may use."""
    import time

    import torch

    left, right = torch.randn(2, 1024, 1024, dtype=torch.float32, device="cpu")
    best_s = float("inf")
    for _ in range(6):
        start_s = time.perf_counter()
        torch.mm(left, right)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * 1024**3 / best_s


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pycomm advise", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a number of parameters, such as 125M or 7B, or module:callable that makes the nn.Module")
    add("--memory", required=True, metavar="BYTES", help="of a rank, such as 24GiB")
    add("--hosts", type=int, default=1, metavar="N", help="(default: %(default)s)")
    add("--ranks", type=int, default=1, metavar="N", help="ranks a host (default: %(default)s)")
    add("--bandwidth", default="25Gbit", metavar="B", help="of a host's link (default: %(default)s)")
    add("--host-bandwidth", default="8GB", metavar="B", help="inside a host, of one rank (default: %(default)s)")
    add("--flops", metavar="N", help="operations a second that a rank sustains, such as 300T (default: measured here)")
    add("--batch", type=int, metavar="N", help="samples a step, over all ranks (default: a micro-batch a rank)")
    add("--micro-batch", type=int, default=1, metavar="N", help="samples a rank computes at once (default: 1)")
    add("--length", type=int, default=1024, metavar="N", help="positions of a sample (default: %(default)s)")
    add("--precision", default="fp32", help="fp32, mixed or bf16 (default: %(default)s)")
    add("--optimizer", default="adamw", help="adamw, momentum or sgd (default: %(default)s)")
    add("--gpu", action="store_true", help="messages inside a host run beside the computation")
    for name in ("layers", "width", "heads", "vocabulary"):
        add(f"--{name}", type=int, metavar="N", help="of the model, instead of what is found or assumed")
    add("--all", action="store_true", help=f"show every layout of tp and pp, not only {_SHOWN}")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--svg", type=Path, metavar="FILE", help="draw memory and step time of those shown")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the options; returns 1 if none fits."""
    from ..engines.planning.parallelism import plan_parallelism

    options = _parser().parse_args(sys.argv[2:] if argv is None else list(argv))
    if options.svg is not None:
        from .plan.picture import require_matplotlib

        require_matplotlib()
        check_output("--svg", options.svg, PICTURES)
    names = ("layers", "width", "heads", "vocabulary")
    known = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    plan = plan_parallelism(
        _load(options.model),
        options.memory,
        options.hosts,
        options.ranks,
        (options.host_bandwidth, options.bandwidth),
        flops_per_s=_measured_flops() if options.flops is None else float(parse_count(options.flops)),
        global_batch=options.batch,
        micro_batch=options.micro_batch,
        length=options.length,
        precision=options.precision,
        optimizer=options.optimizer,
        overlaps_inside=options.gpu,
        **known,
    )
    grids = [option for option in plan.options if option.layout.tp * option.layout.pp > 1]
    hidden = () if options.all else grids[_SHOWN:]
    shown = [option for option in plan.options if option not in hidden]
    if options.json:
        print(json.dumps(_as_dict(plan)))
    else:
        _show(plan, shown)
    if options.svg is not None:
        _draw(plan, shown, options.svg)
    return 0 if plan.chosen is not None else 1


def _as_dict(plan: ParallelismPlan) -> dict[str, Any]:
    def one(option: Option) -> dict[str, Any]:
        held, taken = option.memory, option.time
        return {
            **option.layout._asdict(),
            "memory_bytes": {**held._asdict(), "total": held.total},
            "seconds": {**taken._asdict(), "total_s": taken.total_s},
            "fits": option.fits,
            "reason": option.reason,
        }

    return {
        "chosen": None if plan.chosen is None else str(plan.chosen.layout),
        "reason": plan.reason,
        "memory_bytes": plan.memory_bytes,
        "flops_per_s": plan.cluster.flops_per_s,
        "model": {name: getattr(plan.model, name) for name in plan.model.__dataclass_fields__},
        "work": plan.work._asdict(),
        "options": [one(option) for option in plan.options],
    }


def _title(plan: ParallelismPlan) -> str:
    model, cluster, work = plan.model, plan.cluster, plan.work
    assumed = "assumed " if model.is_assumed else ""
    return (
        f"{model.parameters / 1e6:,.6g} M parameters ({assumed}{model.layers} layers of width {model.width}), "
        f"{cluster.hosts} x {cluster.ranks_per_host} ranks of {plan.memory_bytes / 2**30:.4g} GiB and "
        f"{cluster.flops_per_s / 1e12:.3g} Tflop/s\n"
        f"a step of {work.global_batch} samples of {work.length} positions, {work.micro_batch} at once, "
        f"{work.precision}"
    )


def _show(plan: ParallelismPlan, shown: Sequence[Option]) -> None:
    from rich.console import Console, Group

    from ..monitor._tables import FirstThatFits

    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    console.print(_title(plan), style="italic")
    whole, figures = _table(plan, shown, has_reasons=True), _table(plan, shown, has_reasons=False)
    reasons = [f"{option.layout}: {option.reason}" for option in shown if option.reason]
    console.print(FirstThatFits(whole, Group(figures, *reasons)))
    if len(shown) < len(plan.options):
        console.print(f"and {len(plan.options) - len(shown)} more: --all", style="dim")
    if plan.chosen is None:
        console.print("nothing fits: more ranks, more memory a rank, or a smaller micro-batch", style="red")


def _table(plan: ParallelismPlan, shown: Sequence[Option], has_reasons: bool) -> Table:
    from ..monitor._tables import FittingTable
    from .plan.predict import duration

    table = FittingTable(dispensable=("bubble", "activations", "state"))
    table.header_style = "dim"
    for name in ("layout", "GiB", "state", "activations", "step", "computing", "messages", "bubble"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    if has_reasons:
        table.add_column("why")
    for option in shown:
        held, taken = option.memory, option.time
        state = held.parameters + held.gradients + held.optimizer + held.gathered
        nbytes = (f"{each / 2**30:.2f}" for each in (held.total, state, held.activations))
        times = (taken.total_s, taken.compute_s, taken.data_s + taken.tensor_s, taken.bubble_s)
        style = "bold green" if option is plan.chosen else "" if option.fits else "dim"
        why = [option.reason] if has_reasons else []
        table.add_row(str(option.layout), *nbytes, *map(duration, times), *why, style=style)
    return table


def _draw(plan: ParallelismPlan, shown: Sequence[Option], path: Path) -> None:
    """Writes the picture: bytes by class and seconds by what they are spent on, a bar a layout."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "pycomm"  # the same picture is the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot, ticker

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, max(2.4, 0.8 + 0.34 * len(shown))), layout="constrained", sharey=True
    )
    labels = [str(option.layout) for option in shown]
    before_bytes, before_s = [0.0] * len(shown), [0.0] * len(shown)
    for name, colour in _CLASSES.items():
        sizes = [getattr(option.memory, name) / 2**30 for option in shown]
        left.barh(labels, sizes, left=before_bytes, color=colour, label=name)
        before_bytes = [start + size for start, size in zip(before_bytes, sizes)]
    for name, colour in _TIMES.items():
        times = [getattr(option.time, f"{name}_s") for option in shown]
        right.barh(labels, times, left=before_s, color=colour, label=name)
        before_s = [start + taken for start, taken in zip(before_s, times)]
    left.axvline(plan.memory_bytes / 2**30, color="#22303c", linestyle="--", linewidth=1)
    left.set(xlabel="GiB of a rank (dashed: what it has)")
    right.set(xlabel="time of a step")
    right.xaxis.set_major_locator(ticker.MaxNLocator(5))
    right.xaxis.set_major_formatter(ticker.EngFormatter("s"))
    left.invert_yaxis()
    for axes in (left, right):
        axes.legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(plan), fontsize=9, x=0.01, ha="left")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
