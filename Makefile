# On a fresh machine with Python 3.11 or newer: `make run`, then `make test`.
#
# run        the default run of train_gsm8k.py        test       what every change must pass
# smoke      checks a machine for GPU runs            test-all   slow tests, vLLM, TRL, verl, browser
# notebooks  opens the lessons                        lecture    slides and handout as PDF

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=

run: .venv/ready
	.venv/bin/python train_gsm8k.py $(ARGS)

smoke: .venv/ready
	.venv/bin/python tests/smoke.py $(ARGS)

notebooks: .venv/notebooks-ready
	.venv/bin/python -m jupyterlab --LabApp.default_url=/lab/tree/notebooks $(ARGS)

# Executes the solutions again and stores their outputs.
lessons: .venv/notebooks-ready
	TQDM_MINITERS=1e9 TQDM_MAXINTERVAL=1e9 .venv/bin/python -m nbconvert --to notebook --execute \
		--inplace --ExecutePreprocessor.timeout=900 \
		--ExecutePreprocessor.record_timing=False notebooks/solutions/*.ipynb

# Marp and the fonts come from npm, and Chromium prints.
lecture: build/lecture/ready chromium
	cd docs/lecture && CHROME_NO_SANDBOX=1 ../../build/lecture/node_modules/.bin/marp slides.md \
		handout.md --html --theme-set . --allow-local-files --pdf

build/lecture/ready:
	npm install --prefix $(@D) --no-save --no-audit --no-fund @marp-team/marp-cli@4.5.1 \
		@fontsource/source-sans-3@5.3.1 @fontsource/inconsolata@5.3.0
	touch $@

# ---- tests ---------------------------------------------------------------------------------------
# Two processes with one thread each; a file stays in one process, and short files come last.
test test-all: export OMP_NUM_THREADS = 1
PYTEST = .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: .venv/dev-ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check

test: lint
	$(PYTEST) -m "not slow" $(ARGS)

test-all: export VLLM_PYTHON = .venv-vllm/bin/python
test-all: export TRL_PYTHON = .venv-trl/bin/python
test-all: export VERL_PYTHON = .venv-verl/bin/python
test-all: lint .venv-vllm/ready .venv-trl/ready .venv-verl/ready chromium
	$(PYTEST) $(ARGS)

# The browser of the page's test. Debian has it, and only root can install it.
chromium:
	command -v chromium > /dev/null || { apt-get update -qq && apt-get install -y -qq chromium; }

# ---- environments --------------------------------------------------------------------------------
# As a module, pip works in a renamed clone, too.
PIP = $(@D)/bin/python -m pip install --no-compile $(PIP_ARGS)
CHECK_VERSION = import sys; sys.version_info >= (3, 11) or sys.exit(\
	"topr: needs Python 3.11 or newer; install it, and add PYTHON=python3.11 to the command")

# torch comes first: an open range of another package could bring another build.
define install
	[ -e $(@D)/bin/python ] || $(PYTHON) -c '$(CHECK_VERSION)'
	[ -e $(@D)/bin/python ] || $(PYTHON) -m venv $(@D)
	$(PIP) torch==2.13.0
	$(PIP) -r $<
	$(if $(NO_DEPS),$(PIP) --no-deps $(NO_DEPS))
	touch $@
endef

# Only the few-shot prompts of lm-eval are used.
.venv/ready: NO_DEPS = lm-eval==0.4.13 -e ./conformance
.venv/ready: requirements.txt conformance/pyproject.toml
	$(install)

.venv/notebooks-ready: notebooks/requirements.txt .venv/ready
	$(install)

.venv/dev-ready: tests/environments/dev.txt .venv/notebooks-ready
	$(install)

.venv-verl/ready: NO_DEPS = verl==0.9.1
.venv-%/ready: tests/environments/%.txt
	$(install)

# The packages for pictures and sound that vLLM brings are built for another torch than the CPU's.
.venv-vllm/ready: tests/environments/vllm.txt
	$(install)
	$(@D)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec

clean:
	rm -rf .venv .venv-*

.PHONY: run smoke notebooks lint test test-all chromium lessons lecture clean
