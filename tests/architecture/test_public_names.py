"""The names that users rely on. A change here is a change of the API: say it in CHANGELOG.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pycomm
from pycomm import env
from pycomm.ops import native as find_native

ROOT = Path(__file__).resolve().parents[2]

PUBLIC_NAMES = """
    CheckpointError CollectiveMismatchError CollectiveRecord CollectiveTimeoutError CommStream CompressionReport
    Config ConfigError DistributedDataParallel DistributedOptimizer DistributedSampler FullyShardedDataParallel
    Group Mesh NON_MEMBER NativeUnavailableError P2POp PeerLostError Pipeline PlanError PremulSum PycommError
    ReduceOp TransportError Work __version__ all_gather all_gather_into_tensor all_gather_object all_gather_single
    all_reduce all_reduce_mean all_to_all all_to_all_single barrier batch_isend_irecv broadcast
    broadcast_object_list broadcast_optimizer_state broadcast_parameters clip_grad_norm_ coalescing compression
    empty explain finalize fully_shard gather gather_object get_group init irecv is_initialized isend local_rank
    monitor new_group overlap plan_parallelism premul_sum rank recv recv_object_list reduce reduce_scatter
    reduce_scatter_single reduce_scatter_tensor scatter scatter_object_list send send_object_list split verify
    world_size zeros
""".split()

ENVIRONMENT = {
    "PYCOMM_ALGORITHMS",
    "PYCOMM_CACHE_DIR",
    "PYCOMM_HANG_S",
    "PYCOMM_LOG",
    "PYCOMM_MONITOR",
    "PYCOMM_MPI_CUDA_AWARE",
    "PYCOMM_STORE",
    "PYCOMM_TIMEOUT_S",
    "PYCOMM_TORCH_COMPRESSION",
    "PYCOMM_TRANSPORT",
}
BUILD_ENVIRONMENT = {"PYCOMM_CUDA"}


def test_public_names_are_frozen() -> None:
    assert sorted(pycomm.__all__) == sorted(PUBLIC_NAMES)


def test_public_names_are_there_and_documented() -> None:
    for name in pycomm.__all__:
        thing = getattr(pycomm, name)
        assert name in ("__version__", "NON_MEMBER") or thing.__doc__, name


def stubs_of(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """The names that a body of stubs has, each with what is inside."""
    found: dict[str, list[ast.stmt]] = {}
    for each in body:
        if isinstance(each, ast.ClassDef | ast.FunctionDef):
            found[each.name] = each.body
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found[each.target.id] = []
    return found


def test_the_native_module_has_stubs_of_all_its_names() -> None:
    native = find_native()
    stubs = stubs_of(ast.parse(Path(pycomm.__file__).with_name("_native.pyi").read_text(encoding="utf-8")).body)
    missing = [name for name in vars(native) if name[0] != "_" and name not in stubs]
    for name, kind in vars(native).items():
        if isinstance(kind, type) and name in stubs:
            inside = stubs_of(stubs[name])
            missing += [f"{name}.{each}" for each in vars(kind) if each[0] != "_" and each not in inside]
    assert not missing


def test_environment_variables_are_frozen_and_explained() -> None:
    assert set(env.VARIABLES) == ENVIRONMENT
    assert all(variable.meaning for variable in env.VARIABLES.values())


def test_environment_variables_stand_in_the_documentation() -> None:
    table = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("## Environment variables")[2]
    assert set(re.findall(r"^\| `(PYCOMM_\w+)`", table, re.MULTILINE)) == ENVIRONMENT | BUILD_ENVIRONMENT


def test_only_the_table_reads_our_variables() -> None:
    """A variable that is read past the table has no default, no check and no line in `pycomm doctor`."""
    unknown = {}
    for path in sorted((ROOT / "pycomm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"PYCOMM_[A-Z0-9_]+[A-Z0-9]", node.value):
                    unknown[node.value] = f"{path.relative_to(ROOT)}:{node.lineno}"
    for name in ENVIRONMENT | BUILD_ENVIRONMENT:
        unknown.pop(name, None)
    assert unknown == {}
