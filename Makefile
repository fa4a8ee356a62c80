# make run    set up .venv, then data-parallel training on real data: the main job, end to end
# make test   set up .venv, then the test suite
# make gpu-check  on a machine with a GPU: build with CUDA, GPU tests, benchmark of the kernels
# make test-torch-versions  what depends on torch the most, from one wheel, on every torch of TORCH_VERSIONS
# make peers  the libraries that `pycomm bench --against` compares with, each in an environment of its own
# Needs Python 3.11+ with venv and headers, a C++17 compiler and make. PYTHON=python3.12 picks another interpreter.
# Where nothing can be downloaded: OFFLINE=1 VENV=DIR, an environment that holds the packages already (a cluster's torch).

PYTHON ?= python3
VENV   ?= .venv
bin    := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images of containers set it; each of hundreds of processes would then compile the tests' modules for itself.
unexport PYTHONDONTWRITEBYTECODE
# Many tests wait more than they compute, so three workers share two cores; a file is one worker's. WORKERS= for none.
# What fails is shown when it does: of a run that is broken off there is nothing else.
WORKERS ?= -n 3 --dist loadfile --no-loadscope-reorder --instafail
alone = $(shell grep -rl --include='*.py' 'mark\.alone' tests)
native_sources := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: run test test-torch-versions peers lint gpu-check wheel clean setup
.DELETE_ON_ERROR:

run: setup
	$(bin)/pycomm run -n 2 examples/train_digits.py --plot digits.png

test: setup $(VENV)/.stamp-spin
	$(bin)/python -m pytest -m alone $(or $(TESTS),$(alone)) || test $$? -eq 5  # none of those are among TESTS
	$(bin)/python -m pytest -m "not alone" $(WORKERS) $(TESTS)

# One wheel for all; each torch in an environment of its own, .venv-torch-X (some 5 GB: the index has CUDA builds).
TORCH_VERSIONS ?= 2.11.0 2.14.1 2.15.0

test-torch-versions: setup wheel
	@for version in $(TORCH_VERSIONS); do \
		venv=.venv-torch-$$version; echo "== torch $$version"; \
		test -x $$venv/bin/python || $(PYTHON) -m venv $$venv || exit 1; \
		$$venv/bin/python -m pip install -q torch==$$version numpy rich pytest pytest-timeout hypothesis || exit 1; \
		$$venv/bin/python -m pip install -q --no-deps --force-reinstall dist/pycomm-*.whl || exit 1; \
		$$venv/bin/python -P -m pytest -q -m "not mpi" tests/dist/test_torch_backend.py tests/dist/test_gloo_exchange.py || exit 1; \
	done

peers: setup
	$(bin)/python -m pycomm bench --make-peers

# On a machine with a GPU and nvcc: build, GPU tests, benchmark; the figures go to benchmarks/results.
gpu-check:
	rm -f $(VENV)/.stamp-built
	PYCOMM_CUDA=1 $(MAKE) setup
	@$(bin)/python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else f"gpu-check: torch {torch.__version__} sees no GPU (torch.cuda.is_available() is False)")'
	$(bin)/python -m pytest tests/gpu
	$(bin)/python benchmarks/kernels.py --device cuda --rounds 5 --json benchmarks/results/kernels-cuda.json

lint: setup
	$(bin)/ruff check .
	$(bin)/mypy

wheel: setup
	$(bin)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info pycomm/*.so $(VENV)/.stamp-built .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Three stamps, each redone only when what it depends on has changed: the environment, its packages, the native build.
setup: $(VENV)/.stamp-built

$(VENV)/.stamp-created:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there. Install Python 3.11 or later (Debian, Ubuntu: apt install python3 python3-venv python3-dev), or name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is `$(PYTHON) -V`; pycomm needs 3.11 or later. Name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) lacks the venv module. Debian, Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig, sys; sys.exit(not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { echo "$(PYTHON) lacks its headers (Python.h). Debian, Ubuntu: apt install python3-dev" >&2; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || command -v c++ >/dev/null || command -v clang++ >/dev/null || { echo "There is no C++ compiler. Debian, Ubuntu: apt install g++ (or set CXX)" >&2; exit 1; }
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	touch $@

# pip would compile to bytecode all that it installs, on one core; half of it nothing here imports: the first use does so.
pip_install := $(bin)/python -m pip install --no-compile $(if $(OFFLINE),--no-index --no-deps,-c constraints.txt)
packages := torch setuptools pybind11 ninja

$(VENV)/.stamp-packages: $(VENV)/.stamp-created pyproject.toml constraints.txt
ifdef OFFLINE
	@$(bin)/python -c 'import importlib.util as u, sys; gone = [p for p in sys.argv[1:] if not u.find_spec(p)]; sys.exit("OFFLINE: $(VENV) lacks " + ", ".join(gone) + ". Name an environment that has them: make OFFLINE=1 VENV=DIR" if gone else 0)' $(packages) numpy rich pytest pytest_timeout hypothesis
else
	$(pip_install) $(packages)
endif
	touch $@

# SPIN checks the model of the shared-memory protocol (tests/model). Where it cannot be installed, those tests say so.
$(VENV)/.stamp-spin: $(VENV)/.stamp-created
	@command -v spin >/dev/null || { test "`id -u`" = 0 && command -v apt-get >/dev/null && { apt-get install -qy spin || { apt-get update -q && apt-get install -qy spin; }; }; } || echo "SPIN is not there: tests/model will skip. Debian, Ubuntu: apt install spin" >&2
	touch $@

$(VENV)/.stamp-built: $(VENV)/.stamp-packages setup.py pycomm/ops/_torch_build.py $(native_sources)
	$(pip_install) --no-build-isolation --editable '.[dev,mpich,examples]'
	touch $@
