# make train   the main job: LeNet on Fashion-MNIST on every device here
# make test    every test, against every framework
# make check   lint, formatting, types
# make bench   the cost of sameness, checkpoints and exchange on this machine, and the tables in README.md
# make chaos   a hundred kills at random moments, each resumed elsewhere: same bits in the end
# make mutants a hundred random changes to the core, which the tests must notice; hours on two cores
#
# Each makes the environments it needs, once; interrupt and repeat at will.

PYTHON ?= python3
VENV   := .venv
MXNET  := .venv-mxnet
BIN    := $(VENV)/bin
# pip installs into an environment from outside, so Debian's python3-venv (which carries ensurepip) is not needed.
into    = $(PYTHON) -m venv --without-pip $(1) && \
	$(PYTHON) -m pip --disable-pip-version-check --python $(1)/bin/python install --quiet

.PHONY: train test check bench chaos mutants clean

train: $(VENV)/train.done
	$(BIN)/samestep train --portable $(ARGS)

test: $(VENV)/test.done $(MXNET)/test.done
	$(BIN)/python tests/run.py --mxnet $(MXNET)/bin/python $(ARGS)

check: $(VENV)/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/test.done
	$(BIN)/python benchmarks/sameness.py
	$(BIN)/python benchmarks/cost.py
	for name in torch jax tensorflow paddle; do $(BIN)/python benchmarks/frameworks.py --backend $$name || exit 1; done
	! test -x $(MXNET)/bin/python || $(MXNET)/bin/python benchmarks/frameworks.py --backend mxnet
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/exchange.py
	$(BIN)/python benchmarks/tables.py

chaos: $(VENV)/test.done
	$(BIN)/python benchmarks/chaos.py
	$(BIN)/python benchmarks/tables.py

mutants: $(VENV)/mutants.done
	$(BIN)/python tests/mutants.py $(ARGS)

$(VENV)/train.done: pyproject.toml constraints.txt
	$(call into,$(VENV)) -c constraints.txt -e '.[torch]'
	@touch $@

$(VENV)/test.done: pyproject.toml constraints.txt
	$(call into,$(VENV)) -c constraints.txt -e '.[torch,jax,tensorflow,paddle,mpi,plot,dev]'
	@touch $@ $(VENV)/train.done

$(VENV)/mutants.done: $(VENV)/test.done
	$(call into,$(VENV)) -c constraints.txt -e '.[mutants]'
	@touch $@

# MXNet 1.9.1 has wheels for Linux only; where there is none, the tests that need it are skipped and say so.
$(MXNET)/test.done: pyproject.toml constraints-mxnet.txt
	$(call into,$(MXNET)) -c constraints-mxnet.txt -e '.[mxnet,mpi,dev-mxnet]' || echo "MXNet cannot be installed here"
	@mkdir -p $(MXNET) && touch $@

clean:
	rm -rf $(VENV) $(MXNET) build dist src/*.egg-info
