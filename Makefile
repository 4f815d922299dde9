# make regress   the bitwise-loss regression (no GPU needed), configs/gpt_tiny.toml
# make test      the test suite (no GPU needed)
# make test-gpu  the tests marked gpu and not slow
# make test-gpus the tests marked two_gpus
# make check     everything that CI runs
# make docs      the documentation as a site, in build/site
# make shell     a shell in which megaopt and python are those of .venv
#
# PY=python3 uses an interpreter that has torch already, and sets nothing up:
#   make test-gpu PY=python3

VENV := .venv
PY ?= $(VENV)/bin/python
CONFIG ?= configs/gpt_tiny.toml
# processes of the test suite: some 14 minutes of a processor, of which two cores make 9
JOBS ?= 2

# what a regression needs beside torch: Megatron-Core where the config asks for it
COMMANDS := $(if $(findstring megatron,$(CONFIG)),megatron,cli)

ifeq ($(PY),$(VENV)/bin/python)
READY := $(VENV)/ready
RUNS := $(VENV)/ready-$(COMMANDS)
DOCS := $(VENV)/ready-docs
BIN := $(VENV)/bin/
else
READY :=
RUNS :=
DOCS :=
BIN :=
endif

.PHONY: regress test test-all test-exhaustive test-gpu test-gpus lint types package docs shell check clean

# cases of the golden record first: the same bits on every machine; make test-all steps all of them
regress: $(RUNS)
	@echo "comparing optimizer steps with the golden record, bit for bit"
	@$(BIN)megaopt verify --backends reference
	@echo "training the variants of $(CONFIG), and comparing them bit for bit"
	@$(BIN)megaopt regress $(CONFIG)

test: $(READY)
	$(BIN)pytest -m "not gpu and not slow and not exhaustive" -n $(JOBS) --dist loadfile

test-all: $(READY)
	$(BIN)pytest -m "not gpu and not exhaustive" -n $(JOBS) --dist loadfile

test-exhaustive: $(READY)
	$(BIN)pytest -m "exhaustive and not gpu" -n $(JOBS) --dist worksteal

test-gpu: $(READY)
	$(BIN)pytest -m "gpu and not slow"

test-gpus: $(READY)
	$(BIN)pytest -m "two_gpus and not exhaustive"

lint: $(READY)
	$(BIN)ruff check . && $(BIN)ruff format --check .

# mypy does not see through an editable install: it reads an installed copy
types: $(READY)
	rm -rf build/types && $(PY) -m pip install -q --no-deps --target build/types .
	cd build/types && $(abspath $(VENV))/bin/mypy --config-file $(abspath pyproject.toml) -p megaopt

package: $(READY)
	$(PY) tools/check_package.py

docs: $(DOCS)
	@echo "building the site"
	@NO_MKDOCS_2_WARNING=1 $(BIN)mkdocs build --strict --quiet
	@echo "the site is in build/site: python3 -m http.server -d build/site serves it at http://localhost:8000"
	@echo "(opened as files pages have no search, and links lead to folders)"

shell: $(RUNS)
	@echo "a shell with megaopt and python of $(VENV); exit ends it"
	@PATH="$(abspath $(VENV))/bin:$$PATH" $${SHELL:-sh}

check: lint types package docs test-all

# what is to be installed decides when to install anew
LISTS := pyproject.toml setup.py constraints.txt
# setuptools warns of every editable install
INSTALL := PYTHONWARNINGS=ignore $(VENV)/bin/python -m pip install -q -c constraints.txt

$(VENV)/pip:
	@echo "making a Python environment in $(VENV)"
	@test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	@$(VENV)/bin/python -m pip install -q --upgrade "pip>=24"
	@touch $@

$(VENV)/ready: $(LISTS) | $(VENV)/pip
	@echo "installing torch, and what tests need, into $(VENV), once: some minutes"
	@$(INSTALL) -e ".[cli,test,lint]"
	@touch $@

$(VENV)/ready-cli: $(LISTS) | $(VENV)/pip
	@echo "installing torch, and what the commands need, into $(VENV), once: some minutes"
	@$(INSTALL) -e ".[cli]"
	@touch $@

$(VENV)/ready-megatron: $(LISTS) | $(VENV)/pip
	@echo "installing torch, Megatron-Core, and what the commands need, into $(VENV), once: some minutes"
	@$(INSTALL) -e ".[cli,megatron]"
	@touch $@

$(VENV)/ready-docs: $(LISTS) | $(VENV)/pip
	@echo "installing what builds the site into $(VENV), once"
	@$(INSTALL) -e ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
