"""The command line of the benchmark, its peers, and one real run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import proc_files, wait_until
from pycomm.cli.bench import main, parse
from pycomm.cli.bench.job import JobFailedError, SpawnedJob
from pycomm.cli.bench.peers import KEEP_MEMORY, MAKE_PEERS, PEERS, missing_peers, peer_names
from pycomm.errors import ConfigError
from warm_python import warm_python


def test_defaults_are_two_places_and_the_powers_of_four() -> None:
    _, settings = parse(["all_reduce"])
    assert settings is not None
    assert settings.sizes == tuple(4**k for k in range(1, 14))
    assert settings.places == ("in", "out") and settings.buffers == ("private",) and settings.against == ()


def test_against_measures_the_usual_place_alone() -> None:
    for verb, place in (("all_reduce", "in"), ("reduce_scatter", "out"), ("broadcast", "in")):
        _, settings = parse([verb, "--against", "gloo,impi", "--buffers", "both"])
        assert settings is not None
        assert settings.places == (place,) and settings.buffers == ("private", "shared")


@pytest.mark.parametrize(
    "argv",
    [
        ["all_reduce", "--dtype", "float33"],
        ["all_reduce", "--transport", "smoke"],
        ["all_reduce", "--plot", "a.jpeg9"],
        ["all_reduce", "--json", "no/such/folder/a.json"],
        ["all_reduce", "--against", "gloo,nccl"],
        ["all_reduce", "--against", "./no/such/checkout"],
        ["all_reduce", "--max-bytes", "many"],
        ["broadcast", "--place", "out"],
        ["sendrecv", "--async"],
    ],
)
def test_what_cannot_be_measured_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse(argv)


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "x"])
@pytest.mark.parametrize("option", ["--round-ms", "--step-factor", "--rounds"])
def test_numbers_are_positive_and_finite(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(["all_reduce", f"{option}={value}"])
    assert stopped.value.code == 2
    assert option in (said := capsys.readouterr().err) and "expected a " in said and f"got '{value}'" in said


def test_a_place_that_is_refused_is_named() -> None:
    with pytest.raises(ConfigError, match="broadcast is only done in place"):
        parse(["broadcast", "--place", "out"])


def test_inside_a_launcher_there_are_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without a launcher"):
        main(["all_reduce", "--against", "gloo"])


def test_peers_are_named_once_and_missing_ones_are_found(tmp_path: Path) -> None:
    assert peer_names("gloo, mpich,gloo") == ("gloo", "mpich")
    assert missing_peers(("gloo", "mpich"), tmp_path) == ("mpich",)
    python = PEERS["mpich"].python(tmp_path)
    python.parent.mkdir(parents=True)
    python.touch()
    assert missing_peers(("gloo", "mpich"), tmp_path) == ()


@pytest.mark.parametrize("is_crowded", [False, True])
@pytest.mark.parametrize("name", list(PEERS))
def test_every_peer_has_a_command_of_its_own_environment(name: str, is_crowded: bool, tmp_path: Path) -> None:
    peer = PEERS[name]
    variants = peer.variants("all_reduce", is_crowded)
    assert len({variant.name for variant in variants}) == len(variants) >= 1
    command, environment = peer.command(variants[0], 4, tmp_path)
    assert command[:3] == [str(tmp_path / name / "bin" / "mpirun"), "-n", "4"] and command[-2:] == ["-m", "worker"]
    assert KEEP_MEMORY.items() <= environment.items()
    assert (Path(environment["PYTHONPATH"]) / "worker" / "__main__.py").exists()


def test_the_worker_needs_nothing_of_pycomm_or_torch() -> None:
    """The MPIs' environments hold numpy and mpi4py alone."""
    folder = Path(sys.modules["pycomm.cli.bench"].__file__ or "").parent
    code = "import sys, worker.runner, worker.__main__; print({'torch', 'pycomm'} & set(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder.anchor,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.stdout.strip() == "set()", run.stderr


def test_a_job_that_dies_while_starting_is_reported_with_its_last_words() -> None:
    job = SpawnedJob("broken", 1)
    job.start([sys.executable, "-c", "raise SystemExit('out of coffee')"], dict(os.environ))
    with pytest.raises(JobFailedError, match="out of coffee"):
        job.wait_until_ready()
    job.kill()


def test_ctrl_c_ends_every_job(tmp_path: Path) -> None:
    """The ranks are in process groups of their own, so that only the conductor sees the signal, and must end them."""
    command = [
        warm_python(),
        "-m",
        "pycomm",
        "bench",
        "all_reduce",
        "-n",
        "2",
        "--max-bytes",
        "4B",
        "--rounds",
        "100000",
    ]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: any(tmp_path.glob("pycomm-bench-*/socket")))
        (folder,) = tmp_path.glob("pycomm-bench-*")
        wait_until(lambda: len(_processes_with(str(folder))) >= 2)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 130 and "interrupted" in output, output
    wait_until(lambda: not _processes_with(str(folder)))
    assert list(tmp_path.iterdir()) == [], "neither the benchmark's folder nor that of `pycomm run`"


def _processes_with(argument: str) -> list[int]:
    return [pid for pid, command in proc_files("cmdline").items() if argument in command]


def test_a_real_run_beside_gloo_and_a_checkout(tmp_path: Path) -> None:
    checkout = f"{Path(sys.modules['pycomm'].__file__ or '').parents[1]}/"
    lines_path = tmp_path / "lines.json"
    command = [warm_python(), "-m", "pycomm", "bench", "all_reduce", "-n", "2", "--max-bytes", "64KiB"]
    command += ["--step-factor", "16", "--rounds", "2", "--round-ms", "2", "--against", f"gloo,impi,{checkout}"]
    command += ["--json", str(lines_path), "--peers-dir", str(tmp_path / "none")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ratio" in run.stdout and f"build it with: {MAKE_PEERS}" in run.stdout
    lines = [json.loads(line) for line in lines_path.read_text().splitlines()]
    assert lines[0]["kind"] == "facts" and lines[0]["cores"] >= 1
    results = [line for line in lines if line["kind"] == "result"]
    assert {(line["library"], line["bytes"]) for line in results} == {
        (library, nbytes) for library in ("pycomm", "gloo", checkout) for nbytes in (4, 64, 1024, 16384)
    }
    assert all(line["wrong"] == 0 and line["time_us"] > 0 and len(line["rounds_us"]) == 2 for line in results)


def test_the_facts_inside_a_launcher_are_of_the_machine_not_of_the_core_of_a_rank(tmp_path: Path) -> None:
    command = [warm_python(), "-m", "pycomm", "run", "-n", "2", "-m", "pycomm", "bench", "all_reduce"]
    command += ["--max-bytes", "4B", "--rounds", "1", "--round-ms", "1", "--json", str(tmp_path / "lines.json")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = (tmp_path / "lines.json").read_text().splitlines()
    assert json.loads(lines[0])["cores"] == len(os.sched_getaffinity(0))
