# Every target does its own set-up: `make ladder` on a fresh clone needs Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.package
READY := $(VENV)/.ready

# What is compiled is stored, pytest's assertions among it, also where the environment says otherwise: the next one finds it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: ladder install test test-wide test-course test-notebooks test-all test-labs test-seconds test-full lint labs labs-check slides slides-check release site test-versions gpu-check clean

ladder: $(PACKAGE)
	$(BIN)/minifsdp ladder

# JupyterLab, and what contributors need.
install: $(READY)

# Three at a time, for much of a test is waiting: each test starts ranks of its own.
PYTEST = $(BIN)/pytest -q
WORKERS := -n 3
BRIEF := not slow and not rest
LIBRARY := $(addprefix tests/,core ddp zero fsdp fsdp2 tensor_parallel context_parallel pipeline state watch machine)
NOTEBOOKS := tests/labs/test_notebooks.py

# What the library claims: the loop while it is being changed.
test: $(READY)
	$(PYTEST) -m "$(BRIEF) and not wide" $(WORKERS) --durations 10 $(LIBRARY)

# The same, and what the loop has no time for, such as more ranks. This target and the two below it together run all of
# tests/ (tests/tools/test_tiers.py).
test-wide: $(READY)
	$(PYTEST) -m "$(BRIEF)" $(WORKERS) --durations 10 $(LIBRARY)

# All others: commands, labs, launches, tools.
test-course: $(READY)
	$(PYTEST) -m "$(BRIEF)" $(WORKERS) --durations 10 $(patsubst %,--ignore %,$(LIBRARY) $(NOTEBOOKS)) tests

# All notebooks, as they are shipped, and one with the reference answers written into the exercises.
test-notebooks: $(READY)
	$(PYTEST) -m "not rest" $(NOTEBOOKS) $(WORKERS)

# These three in one run, as `.ci/run` has it: what waits leaves the cores to what computes.
test-all: $(READY)
	$(PYTEST) -m "$(BRIEF)" $(WORKERS) --durations 10 tests

# All notebooks in both ways, and all wrong answers. The targets above run those of labs that have changed since this one
# ran, and a part of the others (tests/labs/all_ran.py).
test-labs: $(READY)
	$(PYTEST) $(NOTEBOOKS) tests/labs/test_labs.py $(WORKERS)
	$(BIN)/python tests/labs/test_labs.py

# How long each file takes, by which they are ordered, into tests/seconds.json: on a machine that does nothing else.
test-seconds: $(READY)
	rm -f tests/seconds.json
	$(MAKE) test-wide test-course test-notebooks PYTEST="$(PYTEST) --add-seconds"

test-full: $(READY)
	$(PYTEST)

# On the oldest and the newest torch, each in an environment of its own: make test-versions VERSIONS="2.12 2.14"
test-versions: $(READY)
	$(BIN)/python -m tools.test_versions $(VERSIONS)

lint: $(READY) labs-check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict minifsdp tools labs

# The notebooks, those that have changed: `make labs FORCE=1` runs all of them.
labs: $(READY)
	$(BIN)/python labs/build.py $(if $(FORCE),--force)

labs-check: $(READY)
	$(BIN)/python labs/build.py --check

# A deck is made of its text, its figures' code and the package that its numbers come from.
DECK_SOURCES := labs/claims.toml $(wildcard slides/*.* benchmarks/records/*.json benchmarks/records/cpu/*.json) $(shell find slides/draw minifsdp -name '*.py')

# The decks as HTML and PDF in build/slides, and a look at every slide. Needs npm and Chromium (apt install npm chromium).
slides: build/slides/.ready

build/slides/.ready: $(VENV)/.slides slides/node_modules/.ready $(DECK_SOURCES)
	$(BIN)/python slides/decks.py
	@touch $@

# Without either: the figures drawn again, byte for byte, and the decks' rules. Not in `.ci/run`: another kind of processor
# may round a drawn gradient otherwise.
slides-check: $(READY)
	$(BIN)/python slides/decks.py --check

# The lectures' PDFs, numbered, to project and with notes, in build/release: what to attach to a release.
release: build/slides/.ready
	@mkdir -p build/release
	n=0; for deck in memory ddp fsdp overlap practice scale split; do n=$$((n + 1)); for notes in "" -notes; do cp build/slides/$$deck$$notes.pdf build/release/lecture-$$n-$$deck$$notes.pdf; done; done

# The course as a site in build/site, to read without a network; Chromium goes through every page. It needs what `slides` needs.
site: build/slides/.ready
	$(BIN)/minifsdp ladder --ranks 4 --device cpu --out build/ladder
	$(BIN)/python docs/site/build.py

# All that is claimed of GPUs, on this machine's, with the packages that are here: nothing is installed.
# `make gpu-check PART=step` runs one part; several: PART="doctor step".
gpu-check:
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON)) \
		-m tools.gpu_check $(addprefix --part ,$(PART))

# The pip that Python 3.11 brings takes twice as long to resolve as a new one does.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "minifsdp needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip

# Python compiles what is imported when it is: of 7,400 files, that is a third.
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable
$(PACKAGE): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) .
	@touch $@

# Compiled on all cores, without what is not imported here, or only in small part: a process that may not store what it has
# compiled takes three seconds longer to import torch.
UNCOMPILED := /(tests?|testing/_internal|transformers/models|networkx|pip|setuptools|mypyc?|lexers)/
$(READY): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[dev]'
	$(BIN)/python -m compileall -q -j 0 -x '$(UNCOMPILED)' $(VENV)/lib minifsdp
	@touch $(PACKAGE) $@

$(VENV)/.slides: $(READY) pyproject.toml
	$(INSTALL) '.[slides,site]'
	@touch $@

slides/node_modules/.ready: slides/package.json
	cd slides && npm install --no-package-lock --no-audit --no-fund --silent
	@touch $@

clean:
	rm -rf $(VENV) build slides/node_modules results .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
