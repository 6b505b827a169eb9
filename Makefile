# The targets of this project; `make help` lists them. Everything is in tools/, .venv/ and pyproject.toml.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
RABBITMQ_IMAGE ?= rabbitmq:4-management

# Every test counts, and each failure is printed when it happens. A run in which many tests fail ends early: if each of
# them waited for its time limit, the run would take hours.
PYTEST := PYTHONPATH=tests/plugins $(BIN)/pytest -p no_skips -p failures_at_once -p few_reruns --maxfail=8

# The folders that have a target of their own.
OTHER_TESTS := $(addprefix tests/,acceptance docker kubernetes delta hdfs s3 benchmarks)

# Every test that starts Spark, in whichever folder. Beside it, the tests of the other layers would wait for a processor.
SPARK_TESTS := $(addprefix tests/,spark spark_starts acceptance/test_demo.py acceptance/test_demo_telemetry.py \
	acceptance/test_dev_stack.py acceptance/test_failing_tables.py acceptance/test_million_events.py \
	acceptance/test_scheduled_ingests.py acceptance/test_tutorial_of_telemetry.py contract/test_rabbit_stream_contract.py \
	integration/test_changing_data.py integration/test_handlers_on_spark.py integration/test_pooled_sql.py \
	integration/test_telemetry_ingest.py security/test_query_bombs.py security/test_sql_escape.py \
	security/test_sql_fuzz.py security/test_worker_killers.py)

.PHONY: help setup demo demo-priorities demo-protection demo-cluster demo-telemetry run check test test-acceptance test-spark test-docker test-kubernetes bench docs model chaos histories soak fuzz-sql sql-corpora test-pyspark test-delta test-hdfs test-s3 audit sbom requirements

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install RabbitMQ, PostgreSQL, Java, Chromium and .venv if they are missing
	@PYTHON="$(PYTHON)" tools/setup

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

check: setup ## Check formatting, lint, types, import rules, shell scripts, documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	bash -n tools/setup
	bash -n .ci/run
	$(BIN)/mkdocs build --strict --quiet

test: setup ## Run the tests of each layer on real RabbitMQ; a skipped test is a failure
	$(PYTEST) -p shared_rabbitmq -p slow_first --no-loadscope-reorder -n 4 --dist loadfile --hypothesis-profile=thorough --durations=15 tests $(OTHER_TESTS:%=--ignore=%) $(SPARK_TESTS:%=--ignore=%) $(ARGS)

test-acceptance: setup ## Run the tests of daemons and workers as processes, with faults; lost requests fail it
	$(PYTEST) -p shared_rabbitmq -p slow_first --no-loadscope-reorder -n 4 --dist loadfile --durations=15 tests/acceptance $(SPARK_TESTS:%=--ignore=%) $(ARGS)

# The tests of clusters take longest and come first; both of their files wait minutes for a start that must fail. The
# archive of classes halves the processor time of each start of Java. Tests that start earlier run without it.
test-spark: setup ## Run the tests on real Spark: handlers, SQL, telemetry, clusters, failures, the demos
	$(BIN)/osrdyne spark warm-archive >/dev/null & \
	$(PYTEST) -p shared_rabbitmq -p slow_first --no-loadscope-reorder -n 3 --dist loadfile --hypothesis-profile=thorough --durations=15 $(SPARK_TESTS) $(ARGS); \
	status=$$?; wait; exit $$status

# Ryuk, the clean-up container of testcontainers, needs an image that may be missing. The tests remove what they start.
test-docker chaos: export TESTCONTAINERS_RYUK_DISABLED := true
test-docker: setup ## Run the RabbitMQ tests and a short fault run on RabbitMQ 4; test Docker and systemd
	$(PYTEST) -p another_rabbitmq --rabbitmq-image $(RABBITMQ_IMAGE) -p slow_first --no-loadscope-reorder -n 3 --dist loadfile --durations=15 -m 'not soak and not one_rabbitmq' tests/contract tests/integration tests/acceptance $(ARGS)
	$(BIN)/python -m tests.chaos.run --seed 13579 --minutes 0.175 --interval 1.5 --image $(RABBITMQ_IMAGE)
	$(PYTEST) --no-loadscope-reorder -n 3 --dist loadfile tests/docker $(ARGS)

test-kubernetes: setup ## Test the Kubernetes driver and the Helm chart on the API server of KUBECONFIG
	@[[ -n "$$KUBECONFIG" ]] || { echo "make test-kubernetes: set KUBECONFIG to the kubeconfig of an API server on this machine" >&2; exit 1; }
	$(PYTEST) -n 3 --dist load tests/kubernetes $(ARGS)

soak: setup ## Repeat the tests of managed pools at full scale; takes some minutes
	$(PYTEST) -n 0 -m soak tests/acceptance $(ARGS)

model: setup ## Check the lifecycle model with spin; ARGS=--all adds the slow runs
	@tools/setup model
	@$(BIN)/python tests/model/run.py $(ARGS)

chaos: setup ## Inject faults everywhere and count lost requests, e.g. SEED=1 MINUTES=30 ARGS=--pooled
	$(BIN)/python -m tests.chaos.run --seed $(or $(SEED),1) --minutes $(or $(MINUTES),3) $(ARGS)

histories: setup ## Run random histories and hostile messages in memory, e.g. COUNT=10000
	OSRDYNE_HISTORIES=$(or $(COUNT),10000) OSRDYNE_HOSTILE=$(or $(COUNT),20000) $(BIN)/pytest -q -n 2 --dist load tests/component/lifecycle/test_histories.py tests/component/lifecycle/test_hostile_messages.py $(ARGS)

test-pyspark: setup ## Run the attacks on the SQL pipeline with another PySpark: make test-pyspark PYSPARK=4.1.4
	@[[ -n "$(PYSPARK)" ]] || { echo "make test-pyspark: name the version, as in PYSPARK=4.1.4" >&2; exit 1; }
	$(BIN)/pip install --quiet --upgrade --target build/pyspark-$(PYSPARK) pyspark==$(PYSPARK)
	PYTHONPATH=build/pyspark-$(PYSPARK):tests/plugins $(BIN)/pytest -p no_skips tests/security/test_sql_escape.py tests/security/test_sql_fuzz.py $(ARGS)

# Delta Lake has no release for the PySpark of the other extras, so its own versions come first on the path.
test-delta: setup ## Run the SQL pipeline on Delta Lake, with the versions of the extra `delta`
	$(BIN)/pip install --quiet --upgrade --target build/delta $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["delta"][:2])')
	PYTHONPATH=build/delta:tests/plugins $(BIN)/pytest -p no_skips tests/delta $(ARGS)

test-hdfs: setup ## Run the SQL pipeline on a real HDFS, whose servers come from Maven
	PYTHONPATH=tests/plugins $(BIN)/pytest -p no_skips tests/hdfs $(ARGS)

test-s3: setup ## Run the SQL pipeline on an S3 server; its jars come from Maven (690 MB), the server from PyPI
	PYTHONPATH=tests/plugins $(BIN)/pytest -p no_skips tests/s3 $(ARGS)

fuzz-sql: setup ## Generate statements from sqlglot's and Spark's tests and check them with the plan guard: make fuzz-sql COUNT=100000 SEED=1
	$(BIN)/python -m tests.fuzz.sql_fuzz --count $(or $(COUNT),10000) --seed $(or $(SEED),1) $(ARGS)

sql-corpora: setup ## List the queries of TPC-DS and of Spark's own tests that the SQL pipeline refuses: make sql-corpora ARGS="--seconds 300"
	$(BIN)/python -m tests.fuzz.sql_corpora $(ARGS)

bench: setup ## Run benchmarks against raw-library baselines; prints JSON
	$(BIN)/python -m tests.benchmarks.run $(ARGS)

docs: setup ## Build the documentation site into site/; a broken link is an error
	$(BIN)/mkdocs build --strict

audit: ## Check the code with bandit, and the versions in the images for known vulnerabilities
	@PYTHON="$(PYTHON)" tools/audit

sbom: ## Write sbom.json: a CycloneDX list of the packages that the images install
	@PYTHON="$(PYTHON)" tools/audit sbom

requirements: ## Update the versions and hashes of the packages in the images: make requirements ARGS=--upgrade
	@PYTHON="$(PYTHON)" tools/requirements $(ARGS)
