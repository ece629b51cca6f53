# make report GPU=gtx1080      see `make help`

GPU         ?= auto
STRICT      ?=
A           ?=
B           ?=
BASE        ?=
AGAINST     ?= auto
TOLERANCE   ?= 0.10
ARGS        ?=
PYTHON      ?= python3
NOENV       ?=
TORCH_INDEX ?=
TORCH       ?=
PEERS       ?=
QUALITY     ?=
JUDGE       ?=
MINUTES     ?=
CASES       ?=

WITH_PEERS := $(if $(filter-out 0,$(PEERS)),peers)

# Which Python runs the targets:
#   NOENV=1                                $(PYTHON) as it is, nothing installed
#   an active environment with this lib    that one (conda, or a virtual environment of your own)
#   otherwise                              .venv, built once by lib/setup.sh
ifneq ($(NOENV),)
  PY := $(PYTHON)
  export PYTHONPATH := $(CURDIR)/lib$(if $(PYTHONPATH),:$(PYTHONPATH))
else
  HOLDS_RINGLAB := import os, sys, importlib.util as u; s = u.find_spec("ringlab"); \
    sys.exit(not (s and os.path.samefile(list(s.submodule_search_locations)[0], "lib/ringlab")))
  ACTIVE := $(shell for e in "$$VIRTUAL_ENV" "$$CONDA_PREFIX"; do \
    [ -n "$$e" ] && [ "$$e" != "$(CURDIR)/.venv" ] && "$$e/bin/python" -I -c '$(HOLDS_RINGLAB)' 2>/dev/null && echo "$$e" && break; done)
  ifneq ($(ACTIVE),)
    PY := "$(ACTIVE)/bin/python"
  else
    PY := .venv/bin/python
    # The stamp's name holds what was installed and where: new pins or a moved checkout set up again, a mere touch does not.
    READY := .venv/.ready-$(firstword $(shell { pwd; cat lib/pyproject.toml lib/constraints.txt lib/setup.sh; } | cksum))
    SETTLED := $(shell .venv/bin/python -c pass 2>/dev/null && cat $(READY) 2>/dev/null && echo settled)
    ifeq ($(filter settled,$(SETTLED)),)
      .PHONY: $(READY)
    else ifneq ($(filter-out $(SETTLED),$(TORCH_INDEX) $(WITH_PEERS) $(TORCH)),)
      .PHONY: $(READY)
    endif
    # Byte code is cached on first import, or every measuring process would compile torch again.
    unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME
  endif
endif

# In .venv all is there; in another environment, name what is missing and how to get it instead of a traceback.
COMMA := ,
needs = $(if $(READY),,@sh lib/needs.sh "$(1)" "$(2)" $(PY))
PROFILE_ARG = --profile "$(or $(strip $(GPU)),auto)"
ifneq ($(filter gpu=% Gpu=% profile=% PROFILE=%,$(MAKEOVERRIDES)),)
  $(error a profile is chosen by GPU=name, see `make help`)
endif

ifneq ($(and $(filter compare,$(MAKECMDGOALS)),$(if $(and $(strip $(A)),$(strip $(B))),,missing)),)
  $(error usage: make compare A=cpu B=HEAD~1:cpu, each a profile, a folder, a samples.jsonl or REVISION:PROFILE)
endif
ifneq ($(and $(filter check,$(MAKECMDGOALS)),$(if $(strip $(BASE)),,missing)),)
  $(error usage: make check BASE=HEAD~1:cpu [AGAINST=cpu] [TOLERANCE=0.10])
endif

ifneq ($(filter pdf,$(MAKECMDGOALS)),)
  $(error make pdf was removed; open a page of reports/ in a browser and print it to PDF)
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help report compare check test test-all lab profiles env lint clean

help:  ## list the targets
	@echo "usage: make TARGET [GPU=profile] [STRICT=1] [NOENV=1] [PYTHON=python3] [TORCH_INDEX=cpu|cu126|...] [TORCH=newest] [PEERS=1] [QUALITY=1] [JUDGE=1] [CASES=...] [ARGS=...]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 14

# Reports are no make targets: an unfinished one must neither be deleted nor look up to date, so the driver decides.
# exec: who ends make with a signal ends Python, not a shell around it.
report: $(READY)  ## measure what is missing and write reports/<profile>/ (GPU=auto: this machine; STRICT=1: only measured, none computed; PEERS=1: other packages too; QUALITY=1: train small models first, MINUTES=45 at most; JUDGE=1: install and judge public implementations first)
	$(call needs,[report$(WITH_PEERS:%=$(COMMA)%)],torch $(if $(WITH_PEERS),local_attention ring_attention_pytorch))
	@$(if $(filter-out 0,$(QUALITY)),exec $(PY) notebooks/quality/trainings.py $(PROFILE_ARG) $(if $(MINUTES),--minutes "$(MINUTES)"))
	@$(if $(filter-out 0,$(JUDGE)),exec $(PY) -m ringlab judge)
	@exec $(PY) -m ringlab report $(PROFILE_ARG) $(if $(filter-out 0,$(STRICT)),--strict) $(ARGS)

compare: $(READY)  ## two runs side by side, A=cpu B=HEAD~1:cpu: ratios with intervals, geometric mean
	$(call needs,[report],torch)
	@$(PY) -m ringlab compare "$(strip $(A))" "$(strip $(B))" $(ARGS)

check: $(READY)  ## fail where this machine's rows are worse than earlier ones, BASE=HEAD~1:cpu (TOLERANCE=0.10)
	$(call needs,[report],torch)
	@$(PY) -m ringlab check "$(strip $(BASE))" --against "$(strip $(AGAINST))" --tolerance "$(strip $(TOLERANCE))" $(ARGS)

# Tests side by side, a thread each: threads of one process that wait for those of another cost more than they gain.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses auto --maxprocesses 4

test: $(READY)  ## run the short tests and the examples in the docstrings, few random cases: in five minutes on two cores
	$(call needs,[report$(COMMA)test],torch papermill nbconvert pandas pytest xdist)
	@RINGLAB_CASES="$(or $(CASES),1)" $(PYTEST) -m "not slow" $(ARGS)

test-all: $(READY)  ## run all tests, CASES=10 times as many random cases: in fifteen minutes
	$(call needs,[report$(COMMA)test],torch papermill nbconvert pandas pytest xdist)
	@RINGLAB_CASES="$(or $(CASES),10)" $(PYTEST) $(ARGS)

lab: $(READY)  ## open the notebooks in JupyterLab
	$(call needs,[report$(COMMA)lab],torch pandas jupyterlab)
	@$(PY) -m jupyterlab --notebook-dir=notebooks $(ARGS)

profiles: $(READY)  ## list the hardware profiles and which of them run here
	$(call needs,,torch)
	@$(PY) -m ringlab profiles $(ARGS)

env: $(READY)  ## set up, and print the versions in use
	$(call needs,,)
	@$(PY) -c 'import sys; from importlib.metadata import distributions; \
	v = {d.name.lower(): d.version for d in distributions()}; print("python", sys.version.split()[0], sys.executable); \
	[print(n, v.get(n, "not installed")) for n in sys.argv[1:]]' \
	ringlab torch xformers papermill nbconvert jupyterlab pandas scipy seaborn matplotlib pytest ruff

lint: $(READY)  ## check style, layout and types of lib, tests, notebooks and of the code that users are shown
	$(call needs,[test],ruff basedpyright pyrefly)
	@$(PY) -m ruff check $(wildcard lib tests notebooks) $(ARGS)
	@$(PY) -m ruff format --check $(wildcard lib tests notebooks)
	@$(PY) tests/check_types.py

clean:  ## remove .venv and caches; measured data and reports stay
	rm -rf .venv .pytest_cache .ruff_cache build lib/build lib/dist lib/*.egg-info
	find lib tests notebooks \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} + 2>/dev/null || true

ifneq ($(READY),)
$(READY):
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" TORCH="$(TORCH)" PEERS="$(WITH_PEERS)" sh lib/setup.sh $@
endif
