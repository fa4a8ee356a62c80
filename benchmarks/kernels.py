"""How fast the kernels are, on one thread: ``python benchmarks/kernels.py``; a part: ``... --numel 16M --only topk``.

Speed is bytes of float32 input per second, as a ratio to memcpy of the same bytes; the peers run in the same rounds, in
turn, and the ratios are medians over the rounds, taken within each. Every call writes to memory that is there. On a GPU
(``--device cuda``) memcpy is the device's own copy, and the times are those of its events. ``bar`` is what the project
asks for; in the caches (1M float32) memcpy is three times as fast as from memory, and only the figures count. On a GPU
the bars are 85 % of the copy's bandwidth in bytes really moved, and for topk the time of three passes of reading.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from pycomm.cli.bench.facts import machine_facts
from pycomm.ops import native
from pycomm.ops.pack import pack_, unpack_
from pycomm.ops.quantize import FORMATS, dequantize_, dequantize_add_, payload_bytes, quantize_
from pycomm.ops.topk import scatter_add_, topk_, workspace_bytes

Call = Callable[[], object]
LARGE = 16 << 20  # elements from which on the bars hold
SMALL_TENSOR = 2048  # elements


class Case(NamedTuple):
    """One line: our ``call`` on ``bytes`` of float32, beside ``peers``; ``bars`` are ratios to a peer of that name."""

    name: str
    bytes: int
    memcpy: Call
    call: Call
    peers: dict[str, Call]
    bars: dict[str, float]
    tensors: int = 0  # small ones, whose time each is shown


class Row(NamedTuple):
    """What was measured; ``ratios`` are to memcpy and to the peers: above 1 is faster."""

    name: str
    numel: int
    us: float
    ratios: dict[str, float]
    bars: dict[str, float]
    ns_per_tensor: float


# -- the cases ---------------------------------------------------------------------------------------------------------


def memcpy_of(target: torch.Tensor, source: torch.Tensor) -> Call:
    """Returns a call that copies ``source`` to ``target``: the C library's memcpy, or the GPU's copy."""
    if source.device.type != "cpu":
        return lambda: target.copy_(source)
    num_bytes = source.numel() * source.itemsize
    return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)


def topk_cases(flat: torch.Tensor, memcpy: Call, share: float) -> Iterator[Case]:
    """Exact selection, with and without a residual, with a reused threshold; and the way back."""
    numel, device, k = flat.numel(), flat.device, int(flat.numel() * share)
    indices, values = torch.empty(k, dtype=torch.int32, device=device), torch.empty(k, device=device)
    room = torch.empty(workspace_bytes(numel, k), dtype=torch.uint8, device=device)
    residual, magnitudes = torch.zeros(numel, device=device), flat.abs()
    report = torch.zeros(3, dtype=torch.int32, device=device)
    found = tuple(torch.topk(magnitudes, k))
    topk_(indices, values, flat, report=report, workspace=room)
    calls: dict[str, Call] = {
        "exact": lambda: topk_(indices, values, flat, workspace=room),
        "exact, residual": lambda: topk_(indices, values, flat, residual=residual, workspace=room),
        "reused threshold": lambda: topk_(indices, values, flat, report=report, tolerance=0.25, workspace=room),
        "scatter_add": lambda: scatter_add_(residual, indices, values),
    }
    peers: dict[str, dict[str, Call]] = {
        "exact": {"torch.topk": lambda: torch.topk(magnitudes, k, sorted=False, out=found)}
    }
    bars = {"exact": {"memcpy": 0.25, "torch.topk": 15.0}, "reused threshold": {"memcpy": 1.0}}
    if device.type != "cpu":
        bars = {"exact": {"memcpy": gpu_bar(12, share=1.0), "torch.topk": 5.0}}
    for what, call in calls.items():
        yield Case(f"topk {share:.1%} {what}", 4 * numel, memcpy, call, peers.get(what, {}), bars.get(what, {}))


def quantize_cases(flat: torch.Tensor, memcpy: Call, name: str) -> Iterator[Case]:
    """A format: encode, encode with a residual, decode, decode and add; int8 beside torch's own operators."""
    numel, device = flat.numel(), flat.device
    total, residual = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    payload = torch.empty(payload_bytes(name, numel), dtype=torch.uint8, device=device)
    calls: dict[str, Call] = {
        "quantize": lambda: quantize_(payload, flat, name),
        "quantize, residual": lambda: quantize_(payload, flat, name, residual=residual),
        "quantize, stochastic": lambda: quantize_(payload, flat, name, rounding="stochastic", seed=1),
        "dequantize": lambda: dequantize_(total, payload, name),
        "dequantize_add": lambda: dequantize_add_(total, payload, name),
    }
    if name == "sign":
        del calls["quantize, stochastic"]
    peer = {"torch blockwise int8": torch_blockwise_int8(flat)} if name == "int8" else {}
    bar = {"int8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "int4": 0.8, "sign": 1.0}.get(name)
    if device.type != "cpu":
        bar = gpu_bar(4 + payload.numel() / max(numel, 1))
    for what, call in calls.items():
        is_held = what == "quantize" or (what == "dequantize_add" and device.type == "cpu")
        bars = {"memcpy": bar} if bar and is_held else {}
        yield Case(f"{name} {what}", 4 * numel, memcpy, call, peer if what == "quantize" else {}, bars)


def gpu_bar(bytes_moved: float, share: float = 0.85) -> float:
    """Returns the ratio to a copy, which moves 8 bytes an element, of what moves ``bytes_moved`` nearly as fast."""
    return round(share * 8 / bytes_moved, 2)


def torch_blockwise_int8(flat: torch.Tensor, block: int = 2048) -> Call:
    """Returns int8 quantization in blocks as torch's operators do it, into memory that is there."""
    blocks = flat[: flat.numel() // block * block].view(-1, block)
    scaled, codes = torch.empty_like(blocks), torch.empty(blocks.shape, dtype=torch.int8, device=flat.device)

    def quantize() -> None:
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127
        torch.div(blocks, scales, out=scaled)
        codes.copy_(scaled.round_())

    return quantize


def pack_cases(label: str, shapes: list[tuple[int, ...]], device: torch.device, is_small: bool) -> Iterator[Case]:
    """A parameter list to one bucket and back, plain and as bfloat16 with a factor."""
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    numels = [tensor.numel() for tensor in tensors]
    numel = sum(numels)
    bucket, other = torch.randn(numel, device=device), torch.empty(numel, device=device)
    half, memcpy = torch.empty(numel, dtype=torch.bfloat16, device=device), memcpy_of(other, bucket)
    views = [part.view(shape) for part, shape in zip(torch.split(bucket, numels), shapes, strict=True)]
    calls: dict[str, Call] = {
        f"pack {label}": lambda: pack_(bucket, tensors),
        f"unpack {label}": lambda: unpack_(tensors, bucket),
        f"pack {label}: bf16, scaled": lambda: pack_(half, tensors, 0.25),
    }
    peers: dict[str, Call] = {
        "torch._foreach_copy_": lambda: torch._foreach_copy_(views, tensors),
        "torch._foreach_copy_ back": lambda: torch._foreach_copy_(tensors, views),
        "torch pack, div, bf16": lambda: torch_pack(views, tensors, bucket, half),
    }
    bars: list[dict[str, float]] = [{"memcpy": 1.1}, {}, {"memcpy": 1.2}]
    if device.type != "cpu":
        bars = [{"memcpy": gpu_bar(8)}, {}, {"memcpy": gpu_bar(6)}]
    if is_small:
        bars = [{}, {}, {}]
    for (name, call), peer, asked in zip(calls.items(), peers.items(), bars, strict=True):
        yield Case(name, 4 * numel, memcpy, call, dict([peer]), asked, len(tensors) if is_small else 0)


def torch_pack(
    views: list[torch.Tensor], tensors: list[torch.Tensor], bucket: torch.Tensor, half: torch.Tensor
) -> None:
    """Packs, divides and casts by torch's operators."""
    torch._foreach_copy_(views, tensors)
    half.copy_(bucket.div_(4))


def resnet50() -> list[tuple[int, ...]]:
    """Returns the shapes of a ResNet-50's 161 parameters."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(width, width_in, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            convolutions += [(4 * width, width_in, 1, 1)] if block == 0 else []
            for convolution in convolutions:
                shapes += [convolution, convolution[:1], convolution[:1]]
            width_in = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def gpt2_small() -> list[tuple[int, ...]]:
    """Returns the shapes of a GPT-2 small's 148 parameters."""
    block: list[tuple[int, ...]] = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,)]
    block += [(768, 3072), (3072,), (3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *(12 * block), (768,), (768,)]


# -- measuring ---------------------------------------------------------------------------------------------------------


def time_us(call: Call, device: torch.device, calls: int) -> float:
    """Returns the microseconds of one of ``calls`` calls in a row."""
    if device.type != "cpu":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end) / calls
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - started) / calls


def measure(case: Case, device: torch.device, round_ms: float, rounds: int) -> Row:
    """Runs memcpy, our call and the peers in turn, ``rounds`` times."""
    called = {"memcpy": case.memcpy, "": case.call, **case.peers}
    first = {name: time_us(call, device, 1) for name, call in called.items()}  # warms up, too
    calls = {name: max(1, int(1e3 * round_ms / us)) for name, us in first.items()}
    times: dict[str, list[float]] = {name: [] for name in called}
    for index in range(rounds):
        for name, call in called.items():
            if first[name] > 200e3 and index >= 2:  # a slow peer: twice is enough
                times[name].append(times[name][-1])
            else:
                times[name].append(time_us(call, device, calls[name]))
    us = median(times[""])
    ratios = {
        name: median(other / ours for other, ours in zip(times[name], times[""], strict=True))
        for name in called
        if name
    }
    each = 1e3 * us / case.tensors if case.tensors else 0.0
    return Row(case.name, case.bytes // 4, us, ratios, case.bars, each)


def cases_of(numels: list[int], device: torch.device) -> Iterator[Case]:
    """Yields all cases, the memory of one size before that of the next."""
    for numel in numels:
        flat = torch.randn(numel, device=device, generator=torch.Generator(device).manual_seed(numel))
        memcpy = memcpy_of(torch.zeros(numel, device=device), flat)
        for name in FORMATS:
            yield from quantize_cases(flat, memcpy, name)
        for share in (0.01, 0.001):
            yield from topk_cases(flat, memcpy, share)
    for model, shapes in (("ResNet-50", resnet50()), ("GPT-2 small", gpt2_small())):
        yield from pack_cases(model, shapes, device, is_small=False)
        small = [shape for shape in shapes if torch.Size(shape).numel() <= SMALL_TENSOR]
        yield from pack_cases(f"{model}, small tensors", small, device, is_small=True)


def table_of(rows: list[Row], console: Console) -> None:
    """Prints the rows; a bar that is missed is red."""
    table = Table("kernel", "float32", "us", "GB/s", "/ memcpy", "/ peer", "ns a tensor", "bar")
    for row in rows:
        peers = ", ".join(f"{ratio:.2f} ({name})" for name, ratio in row.ratios.items() if name != "memcpy")
        is_held = row.numel >= LARGE and "pack" not in row.name or "pack" in row.name
        missed = [name for name, bar in row.bars.items() if row.ratios[name] < bar] if is_held else []
        bars = ", ".join(f"{bar:g} {name}" for name, bar in row.bars.items())
        each = f"{row.ns_per_tensor:.0f}" if row.ns_per_tensor else ""
        speed = f"{4e-3 * row.numel / row.us:.1f}"
        cells = (row.name, f"{row.numel:,}", f"{row.us:,.1f}", speed, f"{row.ratios['memcpy']:.2f}", peers, each, bars)
        table.add_row(*cells, style="red" if missed else None)
    console.print(table)


def facts(device: torch.device) -> dict[str, object]:
    """Returns what the figures depend on."""
    gpu = {} if device.type == "cpu" else {"gpu": torch.cuda.get_device_name(device)}
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {**gpu, **machine_facts(), "isa": native().cpu_isa(), "threads": 1, "when": when}


def main() -> int:
    """Measures and prints; with --json also writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", default="1M,16M,64M", help="sizes, in elements: 1M,16M")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--only", default="", help="words of which a case's name has one: topk,int8,pack")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-ms", type=float, default=20.0, help="how long each has its turn in a round")
    parser.add_argument(
        "--json", type=Path, help="file for the figures, a JSON object a line, the machine's facts first"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch {torch.__version__} sees no GPU (torch.cuda.is_available() is False)")
    numels = [
        int(float(word.rstrip("M")) * (1 << 20)) if "M" in word else int(word) for word in options.numel.split(",")
    ]
    wanted = [word for word in options.only.split(",") if word]
    rows = []
    for case in cases_of(numels, device):
        if not wanted or any(word in case.name for word in wanted):
            rows.append(measure(case, device, options.round_ms, options.rounds))
            print(f"{case.name}, {rows[-1].numel}: {rows[-1].us:.1f} us", file=sys.stderr)
    machine = facts(device)
    console = Console(width=160 if not sys.stdout.isatty() else None)
    console.print(", ".join(f"{key}: {value}" for key, value in machine.items()))
    table_of(rows, console)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(machine), *(json.dumps(row._asdict()) for row in rows)]
        options.json.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
