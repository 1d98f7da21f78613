# make train   the main job: LeNet on Fashion-MNIST on every device here
# make test    every test
# make check   lint, formatting, types
# make bench   the cost of sameness on this machine, and the tables in README.md
#
# Each makes the environment it needs in .venv, once; interrupt and repeat at will.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# pip installs into the environment from outside, so Debian's python3-venv (which carries ensurepip) is not needed.
INSTALL = $(PYTHON) -m venv --without-pip $(VENV) && \
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: train test check bench clean

train: $(VENV)/train.done
	$(BIN)/samestep train $(ARGS)

test: $(VENV)/test.done
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/test.done
	$(BIN)/python benchmarks/sameness.py
	$(BIN)/python benchmarks/cost.py
	$(BIN)/python benchmarks/tables.py

$(VENV)/train.done: pyproject.toml constraints.txt
	$(INSTALL) -e '.[torch]'
	@touch $@

$(VENV)/test.done: pyproject.toml constraints.txt
	$(INSTALL) -e '.[torch,plot,dev]'
	@touch $@ $(VENV)/train.done

clean:
	rm -rf $(VENV) build dist src/*.egg-info
