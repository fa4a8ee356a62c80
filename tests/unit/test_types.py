"""The codes of element types and operators are the same in Python and in C++."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from pycomm import ReduceOp, premul_sum
from pycomm.types import DTYPES, PremulSum, dtype_of_code, dtype_of_name

HEADER = (Path(__file__).parents[2] / "csrc" / "types.h").read_text()


def enumerators(name: str) -> dict[str, int]:
    body = re.search(rf"enum class {name} : std::uint8_t {{(.*?)}};", HEADER, re.DOTALL)
    assert body is not None
    return {key.lower(): int(code) for key, code in re.findall(r"k(\w+) = (\d+)", body[1])}


def test_dtype_codes() -> None:
    assert enumerators("DType") == {dtype.name.replace("_", ""): dtype.code for dtype in DTYPES}


def test_item_sizes() -> None:
    sizes = re.search(r"kItemBytes\[kDTypes\] = {(.*?)}", HEADER)
    assert sizes is not None
    assert [int(size) for size in sizes[1].split(",")] == [dtype.itemsize for dtype in DTYPES]


def test_operator_codes() -> None:
    assert enumerators("ReduceOp") == {op.name.replace("_", "").lower(): op.value for op in ReduceOp}


def test_dtypes_are_those_of_torch() -> None:
    for code, dtype in enumerate(DTYPES):
        of_torch = getattr(torch, dtype.name)
        assert dtype.code == code and dtype_of_code(code) is dtype and dtype_of_name(dtype.name) is dtype
        assert of_torch.itemsize == dtype.itemsize
        assert of_torch.is_floating_point == dtype.family.startswith("float")
        assert of_torch.is_complex == (dtype.family == "complex")
    assert dtype_of_name("qint8") is None


def test_premul_sum() -> None:
    assert premul_sum(2) == PremulSum(2.0)
