PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test tables slow demo lint base merge-verbs docs pages notebook release bench fuzz clean
test: $(READY) ## run the test suite
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

tables: $(READY) ## make every table of the paper from the desk recipes, with very little data
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m tables

slow: $(READY) ## the tests that take long: nodes of a Ray cluster are lost, many processes share caches
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow -n 2 --dist loadfile --no-loadscope-reorder

demo: $(READY) ## make a small classifier forget, from data to unlearned model
	HF_HUB_OFFLINE=1 $(BIN)/negmerge unlearn demo --out runs/demo

lint: $(READY) ## format, lint, types, import contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

base: $(READY) ## install the wheel without extras into an environment of its own, and use it
	$(BIN)/python scripts/check_base_install.py

merge-verbs: ## the same on any system, without .venv; only merge, apply, inspect, convert and list
	$(PYTHON) -m pip install -q build
	$(PYTHON) scripts/check_base_install.py --merge-verbs

docs: $(READY) ## build the documentation into site/; strict, without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python scripts/check_site.py

pages: $(READY) ## write the pages of the documentation that are made from the source
	$(BIN)/python scripts/recipe_page.py
	$(BIN)/python scripts/reference_pages.py

notebook: $(READY) ## run the notebook of examples/ and check its results; RECORD=1 keeps the outputs
	HF_HUB_OFFLINE=1 $(BIN)/python scripts/run_notebook.py $(if $(RECORD),--record)

release: $(READY) ## build wheel, sdist, SBOM and documentation into dist/, and try them in a fresh environment
	$(BIN)/python scripts/release.py

bench: $(READY) ## measure speed and memory beside the peers; writes benchmarks/results, docs/measurements.md
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/feed.py
	$(BIN)/python benchmarks/results_page.py

fuzz: $(READY) ## feed damaged input to every reader, 210,000 cases; writes benchmarks/results/fuzz.md
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/fuzz.py --record

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "negmerge needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[test,dev,docs]"
	touch $(READY)

clean: ## remove the environment and everything generated
	rm -rf $(VENV) site dist runs/demo .pytest_cache .hypothesis .ruff_cache
