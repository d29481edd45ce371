# One environment, .venv, for both commands. PYTHON may name any of 3.10 to 3.13.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3.10 || echo python3)
BIN := .venv/bin
BUNDLE := bundles/smollm2-135m
# Published figures and comparisons are of fp32 weights: $(call fp32_bundle,FOLDER OF PROGRAMS)
FP32 := $(BUNDLE)-fp32
fp32_bundle = test -d $(FP32) || $(1)/d2sd-build recipes/smollm2-135m.yaml --set precision=fp32 --out $(FP32) -v

# The versions tested together; docs/install.md has other ways to install.
CONSTRAINTS := constraints/tested.txt
# Modules are compiled when first imported: compiling all of torch takes as long as installing it. Their bytecode is kept
# even where the environment forbids it: the tests start hundreds of processes, and each would compile torch again.
unexport PYTHONDONTWRITEBYTECODE
# An editable install is a path, which type checkers follow too.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) --config-settings editable_mode=compat

.PHONY: help demo test test-slow checks step-files engines readme lint verify gpu-suite kernels ptx mutants consumers trtllm trtllm-sources triton-test client-test dynamo-test bench bench-serving peers soak soak-steps differential fuzz attack arm train ablation train-gpu data wheel docs clean

## the targets, each with its time on two cores
help:
	@awk '/^## /{text = text (text ? "\n                " : "") substr($$0, 4); next} /^[A-Z_]+ *[:?]?=/{next} \
	  /^[a-z][a-z-]*:/{if (text) {split($$1, name, ":"); printf "%-15s %s\n", name[1], text}} {text = ""}' Makefile

## [2 min] on a CPU: build the SmolLM2 bundle, answer a prompt with both drafters, draw it, and compare the policies
demo: .venv/demo
	$(BIN)/d2sd-build recipes/smollm2-135m.yaml --out $(BUNDLE) -v
	mkdir -p build/demo
	$(BIN)/d2sd generate $(BUNDLE) --policy hybrid --stats \
	  -p "Write a Python function that checks whether a string is a palindrome." \
	  --tree-svg build/demo/tree.svg --html build/demo/answer.html
	$(BIN)/d2sd bench $(BUNDLE) --quick --out build/demo/bench
	@echo "The commands are in .venv: source $(BIN)/activate"

WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
PYTEST := $(BIN)/pytest --numprocesses=$(WORKERS) --maxprocesses=8 --dist=worksteal
## [5 min] the tests of every change, installation included; WORKERS=0 runs them in one process
test: .venv/dev
	$(PYTEST) -m "not slow and not full"

## [16 min] the other tests that CI runs: real models, engines of three architectures, whole commands
test-slow: .venv/dev
	$(PYTEST) -m "slow and not full" --ignore=tools/ptxsim --ignore=tests/ptx --ignore=tests/cuda

## [hours] every lane of checks that is red, stale or was never run (tests/lanes), resumable; LANES="ptx kernels" runs those,
## LANES=--list says what state each is in. Results: docs/results/checks.md
checks: .venv/dev
	$(BIN)/python -m tests.lanes $(LANES)

## [1 min] the files that a decode step of `hybrid` runs through, on a CPU and captured
step-files: .venv/dev
	$(BIN)/python -m benchmarks.step_files

## [45 min] what CI samples, whole: TensorRT engines of all layers of SmolLM2 in fp16 and FP8 for any GPU and two architectures,
## kernels of trees, tokens and exact mode in every case, forty exact answers of every policy
engines: .venv/dev
	$(PYTEST) -v -m full --ignore=tools/ptxsim --ignore=tests/ptx --ignore=tests/cuda --ignore=tests/runtime/test_warm_up.py \
	  --ignore=tests/test_readme.py

## [25 min] the README's commands as they are written, in new environments of every CPython found: a gigabyte each
readme: .venv/dev
	$(BIN)/pytest -m "" -rs tests/test_readme.py

## [1 min] ruff and mypy
lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

## [1 min] the public prompt sets: copied to data/ from the folder FROM and checked, or made of the clones in the folder
## REPOSITORIES; without either, lists their sources
data: .venv/demo
	$(if $(REPOSITORIES),$(BIN)/python -m benchmarks.prompts.questions "$(REPOSITORIES)" data)
	$(if $(REPOSITORIES),$(BIN)/python benchmarks/prompts/documents.py "$(REPOSITORIES)" data/train)
	$(BIN)/d2sd data $(if $(FROM),--from "$(FROM)")

## [1 min] the wheel, in dist/: recipes and the SmolLM2 drafters are in it
wheel:
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

## [hours] the losslessness check on 128 real prompts in fp32, resumable; PROMPTS is a folder of four JSONL sets, see `make data`
PROMPTS ?= data/eval
verify: .venv/demo
	$(call fp32_bundle,$(BIN))
	$(BIN)/python benchmarks/lossless.py $(FP32) --prompts $(PROMPTS) --out build/lossless

## [30 min] kernels, engines and tests on a GPU, in five calls; CALL=1 is the first of them alone.
## benchmarks/gpu_pack.sh packs what a machine without an index lacks. DRY=1 runs all but the launches, without a GPU, in
## the environment of the tests, from the beginning
gpu-suite: $(if $(DRY),.venv/dev)
	$(if $(DRY),$(if $(CALL),,rm -rf build/gpu/dry))
	$(if $(DRY),PYTHON=$(abspath $(BIN))/python) sh benchmarks/gpu_suite.sh $(if $(DRY),--dry) $(if $(CALL),--call $(CALL))

## [1 h] compile the Triton kernels for every architecture as they are served, without a GPU; checks resources, and in the
## machine code of each loop over weights, pages or logits what is in flight while it computes; a minute where none has changed
kernels: .venv/dev
	$(BIN)/python -m benchmarks.compile_kernels

## [1 h] what is proven without a GPU (docs/proofs.md): the kernels' PTX executed for four architectures, the step on fake CUDA
## tensors, its launches, and whole days of requests that find every kernel compiled. Two versions of Triton that
## miscompile are installed to see them fail. Executions are kept in build/ptx: those of unchanged kernels are not run again
ptx: .venv/dev build/triton-3.6.0 build/triton-3.7.0
	PTXSIM_KEPT=$(abspath build/ptx) $(PYTEST) -v -m "" tools/ptxsim tests/ptx tests/cuda tests/runtime/test_warm_up.py

## [45 min] does a test notice? Each mutant of a table (tools/mutants), of every kernel and of the graphs' code, in a copy of this
## checkout; MUTANTS="layer_ops H3" runs those with a part of this name or file
mutants: .venv/dev
	$(BIN)/python -m tools.mutants $(MUTANTS)

build/triton-%: | .venv/dev
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==$*

## [30 min] load d2sd's output in transformers, speculators, ModelOpt and TensorRT Edge-LLM: environments of gigabytes, built once
consumers: .venv/dev
	sh benchmarks/consumers.sh $(abspath $(BIN))/python

## [5 min] d2sd's tree in a stand-in for TensorRT-LLM's path: 10,000 steps of random tiny bundles, each text against plain decoding
## and each step against d2sd's runtime, 10,000 trees in slots, 20,000 tokens at T = 1, SmolLM2's pair; SEED=1
trtllm: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.d2sd.integrations.trtllm.soak $(or $(TRTLLM_STEPS),10000) --seed $(SEED)
	$(BIN)/pytest -m full tests/d2sd/integrations/trtllm

## [2 min] the same tests with TensorRT-LLM's own Python files in the stand-in's place, as far as the folder FROM has them
trtllm-sources: .venv/dev
	D2SD_TRTLLM_SOURCES=$(abspath $(FROM)) $(BIN)/pytest -m "" $(addprefix tests/d2sd/integrations/trtllm/test_tree_,serving.py mutants.py sampling.py)

## [10 min] d2sd in a real Triton Inference Server, without a GPU: its wheel wants numpy 1, so an environment of its own, 1.5 GB
TRITON := build/triton
triton-test: $(TRITON)/installed
	$(TRITON)/env/bin/python -m pytest -p no:cacheprovider tests/d2sd/serve/triton

$(TRITON)/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(TRITON)/env
	grep -v '^numpy' $(CONSTRAINTS) > $(TRITON)/constraints.txt
	$(TRITON)/env/bin/python -m pip install --quiet --constraint $(TRITON)/constraints.txt \
	  --editable ".[serve,structured,gguf,plots]" nvidia-pytriton==0.7.0 pytest pytest-timeout filelock
	touch $@

## [2 min] the server behind OpenAI's SDK, LangChain, LlamaIndex, Instructor, LiteLLM and the Agents SDK: 470 MB in an environment
## of their own
CLIENTS := build/clients
client-test: .venv/dev $(CLIENTS)/installed
	D2SD_CLIENTS_PYTHON=$(abspath $(CLIENTS))/bin/python $(BIN)/pytest tests/d2sd/serve/openai/clients

$(CLIENTS)/installed: constraints/clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --no-compile --requirement $<
	touch $@

## [11 min] workers behind NVIDIA Dynamo's frontend, killed, drained and overloaded: two environments of a gigabyte.
## KILLS=13 kills and drains 52 workers
KILLS ?= 2
DYNAMO_TESTS := -m pytest -p no:cacheprovider -rA tests/d2sd/serve/dynamo tests/deploy/test_dynamo.py
dynamo-test: build/dynamo-1.4.2/ready build/dynamo-1.6.1/ready
	D2SD_KILLS=$(KILLS) build/dynamo-1.4.2/bin/python $(DYNAMO_TESTS)
	D2SD_KILLS=1 build/dynamo-1.6.1/bin/python $(DYNAMO_TESTS)

# Dynamo needs an older pydantic than the tested set has. 1.4.2 is the newest release whose requirements are all on PyPI:
# those of 1.6.1 are listed here.
DYNAMO_PIP = $(@D)/bin/python -m pip install --quiet
build/dynamo-%/environment: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(@D)
	grep -v '^pydantic==' $(CONSTRAINTS) > $(@D)/constraints.txt
	$(DYNAMO_PIP) --constraint $(@D)/constraints.txt 'pydantic<=2.13.5' --editable ".[gguf,structured,serve,plots]" \
	  pytest pytest-timeout hypothesis filelock
	touch $@

build/dynamo-1.4.2/ready: build/dynamo-1.4.2/environment
	$(DYNAMO_PIP) --constraint $(@D)/constraints.txt ai-dynamo==1.4.2
	touch $@

build/dynamo-1.6.1/ready: build/dynamo-1.6.1/environment
	$(DYNAMO_PIP) --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	$(DYNAMO_PIP) --constraint $(@D)/constraints.txt 'pydantic>=2.10.6,<=2.13.5' uvloop 'aiohttp>=3.14.3' \
	  'kubernetes>=32,<33' msgspec pyzmq redis tqdm zstandard certifi
	touch $@

## [2 hours] the results of the README, resumable; tables, JSON and plots in build/bench
BENCH := $(BIN)/d2sd bench $(FP32) --methods lookup,chain,reanchor:64,d2sd:64,ddtree:16,ddtree:64,ddtree+lookup:12,hybrid:16,hybrid:64,hybrid+lookup:64
FOUR_SETS := $(foreach set,gsm8k humaneval mbpp mt_bench,--prompts $(PROMPTS)/$(set).jsonl)
bench: .venv/demo
	$(call fp32_bundle,$(BIN))
	$(BIN)/python benchmarks/prompts/by_kind.py $(PROMPTS) build/bench/prompts
	$(BENCH) --prompts build/bench/prompts --temperatures 0 --out build/bench/greedy
	$(BENCH) $(FOUR_SETS) --temperatures 1 --out build/bench/sampled
	$(BIN)/d2sd bench $(FP32) --prompts $(PROMPTS)/gsm8k.jsonl --prompts $(PROMPTS)/mt_bench.jsonl \
	  --out build/bench/serving --methods auto+lookup --concurrency 1,2,4,8,16 --max-new-tokens 48 --repeat 3

# What the loads ask: `d2sd serve`, or with FACE=triton or FACE=dynamo another face of the engine, in its environment.
FACE ?= serve
FACE_BIN := $(or $(if $(filter triton,$(FACE)),$(TRITON)/env/bin),$(if $(filter dynamo,$(FACE)),build/dynamo-1.4.2/bin),$(BIN))
FACE_READY := $(or $(if $(filter triton,$(FACE)),$(TRITON)/installed),$(if $(filter dynamo,$(FACE)),build/dynamo-1.4.2/ready),.venv/dev)

## [hours] the server under load, with the prefix cache on and off, against the engine alone, and with sampling parameters; resumable
SERVING := OMP_NUM_THREADS=1 $(FACE_BIN)/python -m benchmarks.serving $(BUNDLE) --face $(FACE) --out build/bench/$(FACE)
bench-serving: $(FACE_READY)
	test -d $(BUNDLE) || $(FACE_BIN)/d2sd-build recipes/smollm2-135m.yaml --out $(BUNDLE) -v
	$(SERVING) --repeat 3
	$(SERVING) --overhead --policies off,hybrid --repeat 5
	$(if $(filter serve,$(FACE)),OMP_NUM_THREADS=1 $(FACE_BIN)/python -m benchmarks.turns $(BUNDLE) --temperature 0.8 \
	  --parameters none,penalties,top-p,schema --out build/bench/serve/parameters.md)

## [40 min] d2sd, transformers and llama.cpp with the same weights on this CPU, where nothing else runs.
## llama.cpp is compiled, in ten minutes, in an environment of its own, 2 GB
PEERS := build/peers
peers: $(PEERS)/installed
	$(call fp32_bundle,$(PEERS)/env/bin)
	$(PEERS)/env/bin/python -m benchmarks.peers $(FP32) --data $(dir $(PROMPTS)) --out $(PEERS)/results

$(PEERS)/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(PEERS)/env
	$(PEERS)/env/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[gguf,plots]" \
	  llama-cpp-python==0.3.36
	touch $@

## [10 min] mixed load with disconnects, deadlines, kills and malformed requests, then SIGTERM
soak: $(FACE_READY)
	test -d $(BUNDLE) || $(FACE_BIN)/d2sd-build recipes/smollm2-135m.yaml --out $(BUNDLE) -v
	$(FACE_BIN)/python -m benchmarks.soak $(BUNDLE) --face $(FACE) --out build/soak/$(FACE)

## [12 min] 100,000 decode steps of tiny models whose host is one step late, under random load (docs/design.md);
## then 500 on a stand-in for CUDA's runtime (tools/cuda/runtime)
STEPS := 100000
soak-steps: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.runtime.soak $(STEPS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.cuda.runtime.engines 500

## [1 h] 100,000 steps of tiny engines with random requests, parameters at their bounds and broken weights, each answer against
## plain decoding alone; half of them without a compiler; SEED=1
SEED := 0
differential: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.runtime.differential $$(($(STEPS) / 2)) --seed $(SEED)
	OMP_NUM_THREADS=1 D2SD_CC= $(BIN)/python -m tests.runtime.differential $$(($(STEPS) / 2)) --seed $(SEED)

## [10 min] damaged recipes, checkpoints, bundles and templates: each ends in a result or a message, never in a traceback
fuzz: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.fuzz_inputs all build/fuzz --tiny --count 2000 --seed $(SEED)

## [15 min] 5,000 malformed and 300 expensive requests beside honest clients: nobody waits, no memory grows, no answer changes
attack: .venv/demo
	test -d $(BUNDLE) || $(BIN)/d2sd-build recipes/smollm2-135m.yaml --out $(BUNDLE) -v
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.attack $(BUNDLE) --malformed 5000 --expensive 300 --seed $(SEED) \
	  --timeout 45 --out build/attack

## [5 min] the CPU library for aarch64, compiled by a cross compiler and executed under emulation; fetches 1 GB into build/arm, and
## needs Debian's qemu-user and gcc-aarch64-linux-gnu
arm: .venv/dev
	PATH="$(abspath $(BIN)):$$PATH" OMP_NUM_THREADS=1 sh tests/arm/run.sh build/arm python -m pytest -v -p no:cacheprovider -n 0 \
	  -m "not slow and not full" tests/plugins/cpu/test_linear.py tests/modeling/test_native.py tests/modeling/test_packed.py \
	  tests/plugins/trees/test_branches.py tests/plugins/delta_rule/test_delta_rule.py tests/runtime/test_differential.py

## [hours] train a pair from prompts to a measured folder on a CPU, resumable
TRAINING := training/smollm2-135m
train: .venv/demo
	$(BIN)/d2sd train recipes/train/smollm2-135m.yaml --work $(TRAINING) --out build/pair

## [hours] compare training objectives for the first drafter, in chains and trees: on the responses of `make train`, resumable
ablation: .venv/demo
	$(BIN)/python -m benchmarks.ablation recipes/train/smollm2-135m.yaml --work $(TRAINING) --out build/ablation

## [9 min] train on a GPU without a package index, for 500 seconds; benchmarks/train_gpu.sh lists the preparation
train-gpu:
	sh benchmarks/train_gpu.sh train

## [1 min] the documentation site in build/site: generated pages are up to date, every link resolves
docs: .venv/demo
	$(PIP_INSTALL) --editable ".[docs]"
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m docs.support --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv bundles build .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Stamp files: reinstall when pyproject.toml or the tested set changes.
$(BIN)/python:
	$(PYTHON) -m venv .venv
	-$(BIN)/python -m pip install --quiet --upgrade pip  # that of Python 3.11 takes half as long again; any will do

.venv/demo: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP_INSTALL) --editable ".[gguf,plots,serve,structured]"
	touch $@

.venv/dev: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP_INSTALL) --editable ".[gguf,plots,serve,structured,dev,fp8,engines]"
	touch .venv/demo $@
