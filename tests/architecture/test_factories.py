"""Tensors of our own are where and what we say: torch's default device and dtype are for the user's tensors.

Under ``torch.set_default_device("cuda")``, or ``"meta"``, a factory that names no device gives native code of the CPU
an address that is none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from test_layers import ROOT, sources
from torch.utils._device import _device_constructors

FACTORIES = {function.__name__ for function in _device_constructors()}
# Their dtype does not hang on the default one: it is that of the data, or int64.
TYPED = {"arange", "as_tensor", "asarray", "randint", "randperm", "sparse_coo_tensor", "tril_indices", "triu_indices"}


def calls() -> Iterator[tuple[str, str, set[str | None]]]:
    """Yields (place, factory, names of the keyword arguments) of every call of one of torch's factories."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if ast.unparse(node.func.value) == "torch" and node.func.attr in FACTORIES:
                names = {keyword.arg for keyword in node.keywords}
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.func.attr, names


def test_the_walk_sees_them() -> None:
    assert {"empty", "zeros", "ones", "tensor", "arange"} <= {name for _, name, _ in calls()} <= FACTORIES


def test_every_factory_names_its_device() -> None:
    bad = [f"{place}: torch.{name} without device=" for place, name, given in calls() if "device" not in given]
    assert not bad, "\n".join(bad)


def test_every_factory_names_its_dtype() -> None:
    untyped = [(place, name) for place, name, given in calls() if "dtype" not in given and name not in TYPED]
    assert not untyped, "\n".join(f"{place}: torch.{name} without dtype=" for place, name in untyped)


def test_no_file_imports_a_factory_by_name() -> None:
    """The walk would not see its calls."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                bad = FACTORIES & {alias.name for alias in node.names}
                assert not bad, f"{path.relative_to(ROOT)}:{node.lineno}: {bad}; write torch.{min(bad)}(...)"
