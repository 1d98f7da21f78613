# make train   the main job: a modern LeNet on Fashion-MNIST on every device here
# make test    every test, against every framework
# make check   lint, formatting, types
# make docs    the documentation as a site, in build/docs
# make bench   the cost of sameness, checkpoints and exchange on this machine, and the tables in README.md
# make chaos   a hundred kills at random moments, each resumed elsewhere: same bits in the end
# make wild    models of torchvision, timm, transformers, Keras, Paddle, gluon and flax: same bits everywhere
# make mutants a hundred random changes to the core, which the tests must notice; hours on two cores
#
# Each makes the environments it needs, once; interrupt and repeat at will.

PYTHON ?= python3
VENV   := .venv
MXNET  := .venv-mxnet
WILD   := .venv-wild
BIN    := $(VENV)/bin
OTHERS := 3.12 3.13
# pip installs into an environment from outside, so Debian's python3-venv (which carries ensurepip) is not needed.
into    = $(or $(2),$(PYTHON)) -m venv --without-pip $(1) && \
	$(PYTHON) -m pip --disable-pip-version-check --python $(1)/bin/python install --quiet

.PHONY: train test check docs bench chaos wild mutants clean

train: $(VENV)/train.done
	$(BIN)/samestep train --portable $(ARGS)

test: $(VENV)/test.done $(MXNET)/test.done $(OTHERS:%=.venv-%/test.done)
	$(BIN)/python tests/run.py --mxnet $(MXNET)/bin/python $(OTHERS:%=--also .venv-%/bin/python) $(ARGS)

check: $(VENV)/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/test.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/test.done
	$(BIN)/python benchmarks/sameness.py
	$(BIN)/python benchmarks/cost.py
	for name in torch jax tensorflow paddle; do $(BIN)/python benchmarks/frameworks.py --backend $$name || exit 1; done
	! test -x $(MXNET)/bin/python || $(MXNET)/bin/python benchmarks/frameworks.py --backend mxnet
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/exchange.py
	$(BIN)/python benchmarks/readers.py
	$(BIN)/python benchmarks/tables.py

chaos: $(VENV)/test.done
	$(BIN)/python benchmarks/chaos.py
	$(BIN)/python benchmarks/tables.py

# One family of models per process. With ARGS='-k vit' a family may have nothing to run, which is status 5.
wild: $(VENV)/test.done $(MXNET)/test.done $(WILD)/wild.done
	@run() { echo "$$2:"; PYTHONPATH=$$3 SAMESTEP_WILD=$$2 $$1 -m pytest -q --durations=10 tests/wild $(ARGS) || \
		test $$? = 5 || failed=1; }; \
	for name in torchvision timm transformers; do run $(BIN)/python $$name $(CURDIR)/$(WILD)/site-packages; done; \
	for name in keras paddle flax; do run $(BIN)/python $$name; done; \
	! test -x $(MXNET)/bin/python || run $(MXNET)/bin/python gluon; \
	exit $${failed:-0}

mutants: $(VENV)/mutants.done
	$(BIN)/python tests/mutants.py $(ARGS)

$(VENV)/train.done: pyproject.toml constraints.txt
	$(call into,$(VENV)) -c constraints.txt -e '.[torch]'
	@touch $@

$(VENV)/test.done: pyproject.toml constraints.txt
	$(call into,$(VENV)) -c constraints.txt -e '.[torch,jax,tensorflow,paddle,mpi,plot,docs,dev]'
	@touch $@ $(VENV)/train.done

$(VENV)/mutants.done: $(VENV)/test.done
	$(call into,$(VENV)) -c constraints.txt -e '.[mutants]'
	@touch $@

# MXNet 1.9.1 has wheels for Linux only; where there is none, the tests that need it are skipped and say so.
$(MXNET)/test.done: pyproject.toml constraints-mxnet.txt
	$(call into,$(MXNET)) -c constraints-mxnet.txt -e '.[mxnet,mpi,dev-mxnet]' || echo "MXNet cannot be installed here"
	@mkdir -p $(MXNET) && touch $@

# Other versions of Python, where they are installed. A shim of pyenv may be there without the Python that it stands for.
.venv-3.%/test.done: pyproject.toml constraints.txt
	@if python3.$* -c '' 2>/dev/null && test "$$($(PYTHON) -c 'import sys; print(sys.version_info[1])')" != $*; then \
		$(call into,.venv-3.$*,python3.$*) -c constraints.txt -e '.[torch,dev]' && touch $@ || \
		{ echo "samestep cannot be installed for Python 3.$* here"; rm -rf .venv-3.$*; }; fi

# Packages of others, on top of .venv. samestep takes a folder of this name for installed packages, known by their versions.
$(WILD)/wild.done: tests/wild/packages.txt
	$(PYTHON) -m pip --disable-pip-version-check install --quiet --no-deps --upgrade --target $(WILD)/site-packages -r $<
	@touch $@

clean:
	rm -rf $(VENV) $(MXNET) $(WILD) $(OTHERS:%=.venv-%) build dist src/*.egg-info
