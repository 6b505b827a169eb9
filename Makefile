# The targets of this project; `make help` lists them. Everything is in tools/, .venv/ and pyproject.toml.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
RABBITMQ_IMAGE ?= rabbitmq:4-management

# The tier of a test follows from its fixtures (tests/plugins/tiers.py); each tier has a target and writes a report to
# build/junit, from which tools/test_times prints what is slow. A run in which many tests fail ends early: if each of
# them waited for its time limit, the run would take hours.
PYTEST := $(BIN)/pytest --maxfail=8
TIER = $(PYTEST) --tier $(1) --junitxml=build/junit/$(1).xml --durations=10 --no-loadscope-reorder

.PHONY: help setup setup-tests demo demo-priorities demo-protection demo-cluster demo-telemetry run check test test-process test-spark test-rabbitmq4 test-docker test-kubernetes test-all test-nightly bench docs model chaos histories mutants fuzz-sql sql-corpora test-pyspark test-delta test-hdfs test-s3 audit sbom requirements

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install RabbitMQ, Java and .venv if they are missing: what osrdyne and its demos need
	@PYTHON="$(PYTHON)" tools/setup

setup-tests: ## Install what the tests need too: PostgreSQL, Chromium and the packages of the extra dev
	@PYTHON="$(PYTHON)" tools/setup tests

demo: setup ## Run a private RabbitMQ, a daemon and Spark workers on real requests; ends by itself
	@$(BIN)/python tools/demo.py

demo-priorities: setup ## Show how alerts overtake a backlog on a real Spark worker while routes change
	@$(BIN)/python tools/demo_priorities.py

demo-protection: setup ## Show a circuit that opens and recovers, a clamped policy, a quota that runs out
	@$(BIN)/python tools/demo_protection.py

demo-cluster: setup ## Run a standalone Spark cluster and one key whose jobs run on it; ends by itself
	@$(BIN)/python tools/demo_cluster.py

demo-telemetry: setup ## Store telemetry of simulated devices in tables, and draw the lag; ends by itself
	@$(BIN)/python tools/demo_telemetry.py $(ARGS)

run: setup ## Run the daemon: make run ARGS="--config osrdyne.yaml"
	@$(BIN)/osrdyne run $(ARGS)

check: setup-tests ## Check formatting, lint, types, import rules, shell scripts, documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	bash -n tools/setup
	bash -n .ci/run
	$(BIN)/mkdocs build --strict --quiet

test: setup-tests ## Run the tests without processes of their own, on fakes and RabbitMQ: 5 minutes on two cores
	$(call TIER,test) -n 4 --dist loadfile tests $(ARGS)

test-process: setup-tests ## Run daemons, workers and commands as processes, with faults: 3 minutes
	$(call TIER,process) -n 8 --dist loadfile tests $(ARGS)

# The archive of classes halves the processor time of each start of Java; the first start on a machine writes it.
test-spark: setup-tests ## Run handlers, SQL, telemetry and attacks on real Spark: 5 minutes
	$(BIN)/osrdyne spark warm-archive >/dev/null
	$(call TIER,spark) -n 3 --dist loadfile tests $(ARGS)

# Ryuk, the clean-up container of testcontainers, needs an image that may be missing. The tests remove what they start.
test-rabbitmq4 test-docker test-nightly chaos: export TESTCONTAINERS_RYUK_DISABLED := true
test-rabbitmq4: setup-tests ## Repeat the tests about RabbitMQ, and a short fault run, on RabbitMQ 4: 2 minutes
	$(call TIER,rabbitmq4) --rabbitmq-image $(RABBITMQ_IMAGE) -n 4 --dist loadfile tests $(ARGS)
	$(BIN)/python -m tests.chaos.run --seed 31 --minutes 0.275 --interval 1.5 --image $(RABBITMQ_IMAGE)

test-docker: setup-tests ## Test the Docker driver, the images and docker-compose.yml: 4 minutes
	$(call TIER,docker) -n 3 --dist loadfile tests/docker $(ARGS)

test-kubernetes: setup-tests ## Test the Kubernetes driver and the Helm chart on the API server of KUBECONFIG: 2 minutes
	@[[ -n "$$KUBECONFIG" ]] || { echo "make test-kubernetes: set KUBECONFIG to the kubeconfig of an API server on this machine" >&2; exit 1; }
	$(call TIER,kubernetes) -n 3 --dist load tests/kubernetes $(ARGS)

test-nightly: setup-tests ## Run what takes long: demos, tutorials, full scale, systemd, TPC-DS, attacks of long life
	$(call TIER,nightly) -n 2 --dist loadfile --hypothesis-profile=thorough tests $(ARGS)

test-all: export HYPOTHESIS_PROFILE := thorough
test-all: check test test-process test-spark test-rabbitmq4 test-docker test-kubernetes test-nightly test-delta test-hdfs test-s3 histories model ## Run everything, before a release; takes some hours
	$(MAKE) chaos SEED=$(or $(SEED),1) MINUTES=10
	$(MAKE) chaos SEED=$(or $(SEED),1) MINUTES=10 ARGS="--image $(RABBITMQ_IMAGE)"

model: setup-tests ## Check the lifecycle model with spin; ARGS=--all adds the slow runs
	@tools/setup model
	@$(BIN)/python tests/model/run.py $(ARGS)

chaos: setup-tests ## Inject faults everywhere and count lost requests, e.g. SEED=1 MINUTES=30 ARGS=--pooled
	$(BIN)/python -m tests.chaos.run --seed $(or $(SEED),1) --minutes $(or $(MINUTES),3) $(ARGS)

histories: setup-tests ## Run random histories and hostile messages in memory, e.g. COUNT=10000
	OSRDYNE_HISTORIES=$(or $(COUNT),10000) OSRDYNE_HOSTILE=$(or $(COUNT),20000) $(BIN)/pytest -q -n 2 --dist load tests/component/lifecycle/test_histories.py tests/component/lifecycle/test_hostile_messages.py $(ARGS)

mutants: setup-tests ## Plant faults in the kernel, and check that the tests find each: make mutants ARGS="token settle"
	$(BIN)/python -m tests.mutants.run $(ARGS)

test-pyspark: setup-tests ## Run the attacks on the SQL pipeline with another PySpark: make test-pyspark PYSPARK=4.1.4
	@[[ -n "$(PYSPARK)" ]] || { echo "make test-pyspark: name the version, as in PYSPARK=4.1.4" >&2; exit 1; }
	$(BIN)/pip install --quiet --upgrade --target build/pyspark-$(PYSPARK) pyspark==$(PYSPARK)
	PYTHONPATH=build/pyspark-$(PYSPARK) $(BIN)/pytest tests/security/test_sql_escape.py tests/security/test_sql_fuzz.py $(ARGS)

# Delta Lake has no release for the PySpark of the other extras, so its own versions come first on the path.
test-delta: setup-tests ## Run the SQL pipeline on Delta Lake, with the versions of the extra `delta`
	$(BIN)/pip install --quiet --upgrade --target build/delta $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["delta"][:2])')
	PYTHONPATH=build/delta $(BIN)/pytest tests/delta $(ARGS)

test-hdfs: setup-tests ## Run the SQL pipeline on a real HDFS, whose servers come from Maven
	$(BIN)/pytest tests/hdfs $(ARGS)

test-s3: setup-tests ## Run the SQL pipeline on an S3 server; its jars come from Maven (690 MB), the server from PyPI
	$(BIN)/pytest tests/s3 $(ARGS)

fuzz-sql: setup-tests ## Generate statements from sqlglot's and Spark's tests and check them with the plan guard: make fuzz-sql COUNT=100000 SEED=1
	$(BIN)/python -m tests.fuzz.sql_fuzz --count $(or $(COUNT),10000) --seed $(or $(SEED),1) $(ARGS)

sql-corpora: setup-tests ## List the queries of TPC-DS and of Spark's own tests that the SQL pipeline refuses: make sql-corpora ARGS="--seconds 300"
	$(BIN)/python -m tests.fuzz.sql_corpora $(ARGS)

bench: setup-tests ## Run benchmarks against raw-library baselines; prints JSON
	$(BIN)/python -m tests.benchmarks.run $(ARGS)

docs: setup-tests ## Build the documentation site into site/; a broken link is an error
	$(BIN)/mkdocs build --strict

audit: ## Check the code with bandit, and the versions in the images for known vulnerabilities
	@PYTHON="$(PYTHON)" tools/audit

sbom: ## Write sbom.json: a CycloneDX list of the packages that the images install
	@PYTHON="$(PYTHON)" tools/audit sbom

requirements: ## Update the versions and hashes of the packages in the images: make requirements ARGS=--upgrade
	@PYTHON="$(PYTHON)" tools/requirements $(ARGS)
