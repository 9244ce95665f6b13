# On a fresh machine with Python 3.11: `make run`, `make test`, and `make notebooks`, which opens them.

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_ARGS ?=
ARGS ?=
GSM8K_DIR ?=

export GSM8K_DIR

run: .venv/ready
	.venv/bin/python train_gsm8k.py $(ARGS)

test: .venv/ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/python -m pytest $(ARGS)

notebooks: .venv/ready
	.venv/bin/jupyter lab --notebook-dir=notebooks $(ARGS)

# torch before anything that depends on it, or an open range may bring another build along.
# lm-eval is there for the text of its few-shot prompts, which needs none of its dependencies.
.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install $(PIP_ARGS) "$(TORCH)"
	.venv/bin/pip install $(PIP_ARGS) -r requirements.txt
	.venv/bin/pip install $(PIP_ARGS) --no-deps lm-eval==0.4.13
	touch $@

clean:
	rm -rf .venv

.PHONY: run test notebooks clean
