"""Imports go down only. The order is that of docs/design.md; the test reads the sources and imports nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pycomm

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pycomm"

# From the top down. A unit may import what stands in a lower row, and itself. `pycomm` is the package's own __init__.
LAYERS = (
    {"__main__"},
    {"cli"},
    {"fault", "launch"},
    {"checkpoint"},
    {"engines"},
    {"reducer"},
    {"torch_backend"},
    {"pycomm"},
    {"overlap", "monitor"},
    {"collectives"},
    {"compression"},
    {"algorithms"},
    {"transport"},
    {"ops"},
    {"errors", "types", "config", "env", "registry", "sizes", "topology", "_native"},
)
HEIGHT = {unit: len(LAYERS) - row for row, units in enumerate(LAYERS) for unit in units}
BASE = LAYERS[-1]


def unit_of(module: str) -> str:
    """``"pycomm.transport.shm"`` -> ``"transport"``; a name that is no module of the package is the package's own."""
    parts = module.split(".")
    if len(parts) == 1:
        return "pycomm"
    is_module = (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file() or parts[1] == "_native"
    return parts[1] if is_module else "pycomm"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, runtime_only: bool = False) -> Iterator[tuple[int, str]]:
    """Yields (line, absolute module name) of every import of a file, those inside functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = module_of(path).split(".")[: None if path.name == "__init__.py" else -1]
    skipped: set[int] = set()
    if runtime_only:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped |= {id(child) for statement in node.body for child in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # `from .. import env` names a module, `from ..env import read` a name in one: unit_of tells them apart.
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "_csrc" not in path.parts)


def test_every_unit_has_a_layer() -> None:
    units = {unit_of(module_of(path)) for path in sources()}
    assert units - set(HEIGHT) == set(), "say in LAYERS, and in docs/design.md, where this unit stands"
    assert {"errors", "transport", "collectives", "cli"} <= units, "the walk saw too little of the package"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    here = unit_of(module_of(path))
    bad = []
    # The package's own __init__ loads names on first use, from any layer; for type checkers it says from where.
    for line, module in imports(path, runtime_only=here == "pycomm"):
        if module.split(".")[0] != "pycomm":
            continue
        there = unit_of(module)
        is_own = there == here or {here, there} <= BASE
        if not is_own and HEIGHT[there] >= HEIGHT[here]:
            bad.append(f"{path.relative_to(ROOT)}:{line}: {here} imports {module}, which stands beside or above it")
    assert not bad, "\n".join(bad)


def test_base_imports_no_torch() -> None:
    for path in sources():
        if unit_of(module_of(path)) in BASE:
            bad = [f"{path.name}:{line}" for line, module in imports(path, runtime_only=True) if is_of(module, "torch")]
            assert not bad, f"{bad}: plans and the command line use these files without torch"


def test_algorithms_are_plans_without_tensors() -> None:
    runners = ("executor.py", "_agreement.py", "__init__.py")
    files = [path for path in (PACKAGE / "algorithms").glob("*.py") if path.name not in runners]
    assert files
    for path in files:
        bad = [line for line, module in imports(path, runtime_only=True) if is_of(module, "torch", "numpy")]
        assert not bad, f"{path.name}, lines {bad}: an algorithm is a pure function over numbers"


def test_optional_packages_are_imported_inside_functions() -> None:
    # The benchmark's worker for MPI runs in an environment that was made for that MPI.
    for path in set(sources()) - {PACKAGE / "cli" / "bench" / "worker" / "mpi_library.py"}:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            bad = [name for name in names if is_of(name, "mpi4py", "cupy", "psutil", "matplotlib", "prometheus_client")]
            assert not bad, f"{path.relative_to(ROOT)}:{node.lineno}: {bad} is an extra; import it where it is used"


def is_of(module: str, *packages: str) -> bool:
    return module.split(".")[0] in packages


# -- native code ---------------------------------------------------------------------------------------------------


FOREIGN = re.compile(r"^(Python\.h|pybind11/|torch/|ATen/|c10/|dlpack/|numpy/)")


def native_includes() -> Iterator[tuple[Path, int, str]]:
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
            if match:
                yield path.relative_to(ROOT / "csrc"), number, match[1]


def test_only_bindings_see_python_and_torch() -> None:
    rows = list(native_includes())
    assert len(rows) > 20, "the walk saw too little of csrc"
    foreign = [row for row in rows if row[0].parts[0] != "bindings" and FOREIGN.match(row[2])]
    assert not foreign, "\n".join(f"csrc/{path}:{line}: {name}" for path, line, name in foreign)


def test_native_layers() -> None:
    """kernels below shm below bindings; only cuda/ sees CUDA's headers; the core's bindings see no torch."""
    bad = []
    for path, line, name in native_includes():
        where = f"csrc/{path}:{line}: {name}"
        if path.parts[0] in ("kernels", "shm") and "bindings/" in name:
            bad.append(where)
        if path.parts[0] == "kernels" and "shm/" in name:
            bad.append(where)
        if path.parts[:2] in (("kernels", "cpu"), ("shm",)) and name.startswith("cuda"):
            bad.append(where)
        if path.parts[0] == "bindings" and not path.name.startswith("torch_") and re.match(r"(torch|ATen|c10)/", name):
            bad.append(where)
    assert not bad, "\n".join(bad)


def test_nothing_but_the_object_verbs_unpickles() -> None:
    """A peer's bytes never become code on a control path; the object verbs say that they unpickle, and take loads=."""
    unpicklers = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "multiprocessing"}
    users = {
        str(path.relative_to(PACKAGE))
        for path in sources()
        for _, module in imports(path)
        if module.split(".")[0] in unpicklers
    }
    assert users == {"collectives/objects.py"}
    lines = [line for path in sources() for line in path.read_text(encoding="utf-8").splitlines()]
    assert not [
        line for line in lines if re.search(r"\b(torch\.load\(|_object_list\(.*dist\b|allow_pickle=True)", line)
    ]


# -- engines ---------------------------------------------------------------------------------------------------------

ENGINES = ("engines", "reducer")
OPEN_TO_ENGINES = {"pycomm", "ops", "overlap", "errors", "types", "sizes", "topology", "registry", *ENGINES}
OPEN_TO_PLANNERS = {"algorithms"}  # the cost model: arithmetic, as the planners themselves
WITHOUT_TORCH = ("model", "memory", "step_time", "parallelism")  # of engines/planning: `pycomm advise` needs no torch
# Activations and scalars: partial sums of a layer, norms, flags, times. Gradients of parameters: reduce.py alone.
MAY_REDUCE = {
    "reducer/reduce.py": "all of them",
    "reducer/reducer.py": "which parameters have a gradient",
    "reducer/planner.py": "measured times",
    "engines/_buffers.py": "buffers of the model",
    "engines/fsdp/passes.py": "which parameters have a gradient, which units ran",
    "engines/fsdp/scaler.py": "whether a gradient is no number",
    "engines/pipeline/begin.py": "who cannot begin a step",
    "engines/pipeline/outcome.py": "who raised in a step",
    "engines/pipeline/pipeline.py": "measured times",
    "engines/planning/batch.py": "measured bytes",
    "engines/tensor/functions.py": "activations, and their gradients",
    "engines/tensor/loss.py": "what a softmax sums up",
}


def test_engines_use_the_public_interface() -> None:
    """What an engine needs, a program of a user's can have."""
    for path in sources():
        if unit_of(module_of(path)) not in ENGINES:
            continue
        is_planner = path.parent.name == "planning"
        open_units = OPEN_TO_ENGINES | OPEN_TO_PLANNERS if is_planner else OPEN_TO_ENGINES
        for line, module in imports(path):
            assert not (is_planner and path.stem in WITHOUT_TORCH and is_of(module, "torch")), f"{path.name}:{line}"
            if module.split(".")[0] == "pycomm":
                assert unit_of(module) in open_units, f"{path.relative_to(ROOT)}:{line}: {module} is internal"
        names = [
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)
        ]
        for node in names:
            if isinstance(node.value, ast.Name) and node.value.id == "pycomm":
                public = pycomm.__all__
                assert node.attr in public, f"{path.relative_to(ROOT)}:{node.lineno}: pycomm.{node.attr} is not public"


def test_gradients_cross_the_wire_in_one_file() -> None:
    for path in sources():
        if unit_of(module_of(path)) not in ENGINES or str(path.relative_to(PACKAGE)) in MAY_REDUCE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith(("all_reduce", "reduce_scatter")):
                raise AssertionError(
                    f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr} belongs into reducer/reduce.py"
                )
