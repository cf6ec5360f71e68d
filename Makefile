# make demo   softmax forward and backward on this machine: checked, explained, timed, drawn
# make check  what most changes break: plans, dispatch on the CPU, a kernel of each movement; under a minute
# make test   all tests, as CI runs them
# make site   all pages as a site in out/site, to be read from there: a link that leads nowhere is an error
#
# All make .venv with the exact versions of constraints.txt first. PYTHON picks the interpreter (3.10 or newer).
# For torch without CUDA: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
READY := $(VENV)/ready-$(VERSION)
# apt-get, where it can be used without asking anybody.
APT := $(if $(filter 0,$(shell id -u)),$(shell command -v apt-get))
apt_install = $(APT) update -qq && DEBIAN_FRONTEND=noninteractive $(APT) install -y -qq --no-install-recommends

# Tests start many processes, which would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo check test site lint format docs browser wheel hub constraints clean
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo 'make lint | format | docs (what is generated in them) | wheel | hub (the package of the kernel hub) |' \
		'constraints | clean'

demo: $(READY)
	$(BIN)/python -m cute_softmax demo

check: lint
	$(BIN)/python -m pytest -q -n $(JOBS) -m 'not long' tests/test_rooms.py tests/test_problem.py tests/test_panel_plan.py \
		tests/test_launch.py tests/test_states.py tests/test_scored.py tests/test_check.py

test: lint browser
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/layouts/gallery.py

site: $(READY)
	$(BIN)/python -m sphinx -q -E -W --keep-going -c docs . out/site
	@echo 'open out/site/index.html'

wheel: $(READY)
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

hub: $(READY)
	$(BIN)/python .ci/hub.py out/hub

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or newer is needed; name one: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		if [ -n "$(APT)" ]; then $(apt_install) python$(VERSION)-venv; \
		else echo "$(PYTHON) cannot make virtual environments (Debian: apt-get install python3-venv)"; exit 1; fi; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt \
		--no-build-isolation -e '.[dev,cu13]'
	@touch $@

# The layout explorer is tested in Chromium, and PNGs are drawn with cairo: what pip cannot install.
browser: $(READY)
	@{ command -v chromedriver && $(BIN)/python -c 'import cairocffi'; } >/dev/null 2>&1 || { \
		if [ -n "$(APT)" ]; then echo "installing Chromium and ChromeDriver"; \
			$(apt_install) chromium chromium-driver libcairo2 >/dev/null; \
		else echo "Some tests will fail: they need Chromium, ChromeDriver and cairo" \
			"(Debian: apt-get install chromium chromium-driver libcairo2)"; fi; }

constraints: $(READY)
	$(BIN)/python -m pip install -q uv
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.10 --upgrade --no-annotate \
		--custom-compile-command "make constraints" -o constraints.txt

clean:
	rm -rf $(VENV) build dist out *.egg-info
