# The words of this project; `make help` lists them. Everything is in tools/, .venv/ and pyproject.toml.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
RABBITMQ_IMAGE ?= rabbitmq:4-management

.PHONY: help setup demo demo-priorities run check test test-docker test-kubernetes bench docs model chaos histories soak

help: ## List the words
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install what is missing: RabbitMQ, Java, .venv (quick when everything is there)
	@PYTHON="$(PYTHON)" tools/setup

demo: setup ## A private RabbitMQ, a daemon and Spark workers answer real requests; ends by itself
	@$(BIN)/python tools/demo.py

demo-priorities: setup ## Alerts overtake a backlog of data on a real Spark worker, and routes change meanwhile
	@$(BIN)/python tools/demo_priorities.py

run: setup ## Run the daemon: make run ARGS="--config osrdyne.yaml"
	@$(BIN)/osrdyne run $(ARGS)

check: setup ## Formatting, lint, types, import rules, shell scripts, documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	bash -n tools/setup
	bash -n .ci/run
	$(BIN)/mkdocs build --strict --quiet

test: setup ## The whole suite against real RabbitMQ and real Spark; a skipped test is a failure
	PYTHONPATH=tests/plugins $(BIN)/pytest -p no_skips -p slow_first --no-loadscope-reorder -n 3 --dist loadfile --durations=15 tests --ignore=tests/benchmarks --ignore=tests/docker --ignore=tests/kubernetes $(ARGS)

# Ryuk, which would clean up after testcontainers, is an image that need not be there; what is started is removed anyway.
test-docker chaos: export TESTCONTAINERS_RYUK_DISABLED := true
test-docker: setup ## RabbitMQ 4 in a container: the tests that are about RabbitMQ, and some chaos; the Docker driver
	PYTHONPATH=tests/plugins $(BIN)/pytest -p no_skips -p another_rabbitmq --rabbitmq-image $(RABBITMQ_IMAGE) -p slow_first --no-loadscope-reorder -n 3 --dist loadfile --durations=15 tests/contract tests/integration tests/acceptance $(ARGS)
	$(BIN)/python -m tests.chaos.run --seed 13579 --minutes 0.175 --interval 1.5 --image $(RABBITMQ_IMAGE)
	PYTHONPATH=tests/plugins $(BIN)/pytest -p no_skips --no-loadscope-reorder -n 3 --dist loadfile tests/docker $(ARGS)

test-kubernetes: setup ## The Kubernetes driver and the Helm chart against the API server that KUBECONFIG names
	@[[ -n "$$KUBECONFIG" ]] || { echo "make test-kubernetes: set KUBECONFIG to the kubeconfig of an API server on this machine" >&2; exit 1; }
	PYTHONPATH=tests/plugins $(BIN)/pytest -p no_skips -n 3 --dist load tests/kubernetes $(ARGS)

soak: setup ## Managed pools with 10,000 requests that wait, and 5,000 while the daemon is killed: in a few minutes
	PYTHONPATH=tests/plugins $(BIN)/pytest -p no_skips -n 0 -m soak tests/acceptance $(ARGS)

model: setup ## Check the model of the lifecycle with spin: some minutes; make model ARGS=--all for the slow runs too
	@tools/setup model
	@$(BIN)/python tests/model/run.py $(ARGS)

chaos: setup ## Kill, stop and cut off everything for a while, and look for lost requests: make chaos SEED=1 MINUTES=30
	$(BIN)/python -m tests.chaos.run --seed $(or $(SEED),1) --minutes $(or $(MINUTES),3) $(ARGS)

histories: setup ## 10,000 histories of requests and faults in memory, in a minute or two: make histories COUNT=10000
	OSRDYNE_HISTORIES=$(or $(COUNT),10000) $(BIN)/pytest -q -n 2 --dist load tests/unit/test_histories.py $(ARGS)

bench: setup ## Benchmarks beside their bare floors, as JSON
	$(BIN)/python -m tests.benchmarks.run $(ARGS)

docs: setup ## Build the documentation site into site/; a broken link is an error
	$(BIN)/mkdocs build --strict
