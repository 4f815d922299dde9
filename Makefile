# make regress   the bitwise-loss regression (no GPU needed), configs/gpt_tiny.toml
# make test      the test suite (no GPU needed)
# make test-gpu  the tests marked gpu
# make check     everything that CI runs
#
# PY=python3 uses an interpreter that has torch already, and sets nothing up:
#   make test-gpu PY=python3

VENV := .venv
PY ?= $(VENV)/bin/python
CONFIG ?= configs/gpt_tiny.toml
# processes of the test suite; on two cores one takes 15 minutes, two take 11
JOBS ?= 2

ifeq ($(PY),$(VENV)/bin/python)
READY := $(VENV)/ready
BIN := $(VENV)/bin/
else
READY :=
BIN :=
endif

.PHONY: regress test test-all test-exhaustive test-gpu lint types package check clean

regress: $(READY)
	$(BIN)megaopt regress $(CONFIG)

test: $(READY)
	$(BIN)pytest -m "not gpu and not slow and not exhaustive" -n $(JOBS) --dist loadfile

test-all: $(READY)
	$(BIN)pytest -m "not gpu and not exhaustive" -n $(JOBS) --dist loadfile

test-exhaustive: $(READY)
	$(BIN)pytest -m "exhaustive and not gpu" -n $(JOBS) --dist worksteal

test-gpu: $(READY)
	$(BIN)pytest -m gpu

lint: $(READY)
	$(BIN)ruff check . && $(BIN)ruff format --check .

# mypy does not see through an editable install: it reads an installed copy
types: $(READY)
	rm -rf build/types && $(PY) -m pip install -q --no-deps --target build/types .
	cd build/types && $(abspath $(VENV))/bin/mypy --config-file $(abspath pyproject.toml) -p megaopt

package: $(READY)
	$(PY) tools/check_package.py

check: lint types package test-all

$(VENV)/ready: pyproject.toml setup.py constraints.txt
	test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --upgrade "pip>=24"
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e ".[cli,test,lint]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
