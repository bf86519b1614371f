# Two commands are enough: `make demo` and `make test` do their own set-up.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
RADIX_ROPE_CACHE ?= $(HOME)/.cache/radix-rope
VENV ?= $(RADIX_ROPE_CACHE)/venv
BIN := $(VENV)/bin
MODEL ?= smollm2-135m-instruct
PORT ?= 30000
SERVE_ARGS ?=
DEMO_ARGS ?=
SOAK_ARGS ?=
BENCH_PRESET ?= short
BENCH_ARGS ?=
HIT_RATE_ARGS ?=
ROUTER_ARGS ?=
OVERHEAD_ARGS ?=
PYTEST_ARGS ?=
RUFF_RULES := --isolated --line-length 100
LINT_RULES := $(RUFF_RULES) --ignore RUF001,RUF002,RUF003,D107 --select E,F,I,UP,B,SIM,RUF
CODE := radix_rope bench tests

export RADIX_ROPE_CACHE

.PHONY: help setup model demo serve bench bench-serving bench-hit-rate bench-router bench-overhead test test-long patched-env unpatch test-patched soak lint format lock gpu-test gpu-bench clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: ## Create or reuse the environment ($(VENV)) and link this checkout into it
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "radix-rope needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version)." \
	       "Give another with PYTHON=..." >&2; exit 1; }
	@wanted=$$(sha256sum < requirements.lock); \
	if [ "$$(cat '$(VENV)/.radix-rope-lock' 2>/dev/null)" != "$$wanted" ]; then \
	  echo "== installing the environment into $(VENV): about 4 minutes and 11 GB, once"; \
	  $(PYTHON) -m venv '$(VENV)' || { \
	    echo "python -m venv failed; on Debian: apt-get install python3-venv" >&2; exit 1; }; \
	  '$(BIN)/python' -m pip install --disable-pip-version-check -r requirements.lock 2>&1 | \
	    awk '/^Collecting /{n++; printf "\r   %d packages found   ", n; fflush()} \
	         /^Installing collected/{printf "\n   unpacking (2 to 3 minutes)\n"; fflush()} \
	         /^ERROR|error:/{print; fflush()}'; \
	  echo "$$wanted" > '$(VENV)/.radix-rope-lock'; \
	else echo "== reusing the environment in $(VENV)"; fi
	@link="$(CURDIR) $$(sha256sum < setup.cfg)"; \
	if [ "$$(cat '$(VENV)/.radix-rope-link' 2>/dev/null)" != "$$link" ]; then \
	  echo "== linking this checkout into it"; \
	  '$(BIN)/python' -m pip install --disable-pip-version-check -q --no-deps \
	    --no-build-isolation -e . 2>&1 | { grep -v '^WARNING: Location' || true; }; \
	  echo "$$link" > '$(VENV)/.radix-rope-link'; \
	fi

model: setup ## Fetch and convert the small model for demo and tests
	@'$(BIN)/radix-rope' fetch-model $(MODEL)

demo: model ## Stock SGLang against radix_rope on the small model: table, JSON and chart in out/demo
	'$(BIN)/python' -m bench.demo --output out/demo $(DEMO_ARGS)

serve: model ## Serve the small model with radix_rope on PORT (default 30000)
	@model=$$('$(BIN)/radix-rope' fetch-model $(MODEL) 2>/dev/null | tail -n 1); \
	echo "== when it says 'ready to roll', try:"; \
	echo "curl -s http://127.0.0.1:$(PORT)/v1/chat/completions -H 'Content-Type: application/json' -d '{\"model\": \"$(MODEL)\", \"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}], \"max_tokens\": 24, \"temperature\": 0}'"; \
	exec '$(BIN)/python' -W ignore -m sglang.launch_server --model-path "$$model" \
	  --served-model-name $(MODEL) --host 127.0.0.1 --port $(PORT) --dtype float32 \
	  --max-total-tokens 20000 --sleep-on-idle --enable-cache-report --radix-cache-impl radix_rope $(SERVE_ARGS)

bench: ROUTER_ARGS += --repetitions 1
bench: bench-serving bench-hit-rate bench-router ## All benchmarks, short (under 10 minutes on 2 cores); results in bench/results

bench-serving: model ## Serving benchmark: BENCH_PRESET=short (default), claims, tiny or gpu
	'$(BIN)/python' -m bench.serving --preset $(BENCH_PRESET) $(BENCH_ARGS)

bench-hit-rate: model ## Hit rates of sessions, stock against radix_rope: bench/results/hit_rate.*
	'$(BIN)/python' -m bench.hit_rate $(HIT_RATE_ARGS)

bench-router: model ## SGLang's router before two workers, policy by policy: bench/results/router.*
	'$(BIN)/python' -m bench.router $(ROUTER_ARGS)

bench-overhead: model ## What radix_rope costs where nothing is shared: bench/results/overhead.*
	'$(BIN)/python' -m bench.overhead $(OVERHEAD_ARGS)

test: model ## Run the tests (under 20 minutes on 2 cores)
	'$(BIN)/python' -m pytest -m 'not gpu and not long' $(PYTEST_ARGS)

test-long: model ## The tests that need minutes each: soak, families of models, router, exactness
	'$(BIN)/python' -m pytest -m long $(PYTEST_ARGS)

soak: model ## Mixed load on a small engine, every answer checked: SOAK_ARGS="--minutes 15"
	'$(BIN)/python' -m tests.soak $(SOAK_ARGS)

patched-env: setup ## Build a second SGLang with patches/ applied, for PYTHONPATH
	@'$(BIN)/python' -m radix_rope.patching apply

unpatch: setup ## Remove what patched-env built
	@'$(BIN)/python' -m radix_rope.patching remove

test-patched: model patched-env ## Run the integration tests on the patched SGLang
	RADIX_ROPE_PATCHED=1 '$(BIN)/python' -m pytest -m 'not gpu and not long' tests/integration $(PYTEST_ARGS)

lint: setup ## ruff and mypy
	'$(BIN)/ruff' format --check $(RUFF_RULES) $(CODE)
	'$(BIN)/ruff' check $(LINT_RULES),D1 radix_rope
	'$(BIN)/ruff' check $(LINT_RULES) bench tests
	'$(BIN)/mypy'

format: setup ## Format the code
	'$(BIN)/ruff' format $(RUFF_RULES) $(CODE)

lock: setup ## Write requirements.lock anew from the environment
	@{ head -n 2 requirements.lock; '$(BIN)/python' -m pip freeze --all --exclude-editable 2>/dev/null \
	  | grep -viE '^(pip|wheel)=='; } > requirements.lock.new && mv requirements.lock.new requirements.lock

# On a GPU machine with its own torch and Triton; SGLang is not needed.
gpu-test: ## Kernel tests that need an NVIDIA GPU (only torch and Triton)
	$(PYTHON) -m pytest -m gpu tests/rotary/test_gpu.py $(PYTEST_ARGS)

gpu-bench: ## Kernel bandwidth on an NVIDIA GPU (only torch and Triton)
	$(PYTHON) -m bench.kernels --device cuda

clean: ## Remove what demo and tests wrote here (the environment stays)
	rm -rf out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
