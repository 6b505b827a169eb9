# A worker with Spark, Java and the pipelines of osrdyne. Add your own application on top of it:
#   FROM osrdyne/spark-worker
#   COPY my_app.py /opt/osrdyne/app/
# Build: docker build -f deploy/images/spark-worker.Dockerfile -t osrdyne/spark-worker .
# To pin the base image: --build-arg BASE=python@sha256:…
ARG BASE=python:3.11-slim-bookworm
FROM $BASE AS build
WORKDIR /src
# Every file that pip downloads has its hash here (`make requirements`). PySpark has no wheel on PyPI: it is built with
# the tools of requirements-build.txt, because pip would download others without hashes into an isolated environment.
# The dependencies of osrdyne are a layer of their own, so that a change of the code does not install them again.
COPY deploy/images/requirements-build.txt deploy/images/requirements-spark-worker.txt ./
RUN python -m venv /opt/osrdyne && python -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r requirements-build.txt \
 && /opt/build/bin/pip wheel --no-cache-dir --require-hashes --no-build-isolation --wheel-dir /tmp/wheels \
      -r requirements-spark-worker.txt \
 && /opt/osrdyne/bin/pip install --no-cache-dir --no-index --no-deps /tmp/wheels/*.whl \
 && rm -r /tmp/wheels /opt/osrdyne/lib/python3.11/site-packages/pyspark/examples
COPY pyproject.toml README.md LICENSE ./
COPY osrdyne osrdyne
COPY workers/osrdyne_sources workers/osrdyne_sources
COPY workers/osrdyne_worker workers/osrdyne_worker
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM $BASE
RUN apt-get update \
 && apt-get install --yes --no-install-recommends openjdk-17-jre-headless \
 && rm -rf /var/lib/apt/lists/* \
 && ln -s "$(dirname "$(dirname "$(readlink -f /usr/bin/java)")")" /opt/java \
 && groupadd --gid 10001 osrdyne \
 && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin osrdyne
COPY --from=build /opt/osrdyne /opt/osrdyne
COPY --from=build /wheels /tmp/wheels
RUN /opt/osrdyne/bin/pip install --no-cache-dir --no-index --no-deps /tmp/wheels/osrdyne-*.whl \
 && /opt/osrdyne/bin/pip check \
 && rm -r /tmp/wheels
ENV PATH=/opt/osrdyne/bin:$PATH JAVA_HOME=/opt/java PYTHONUNBUFFERED=1 PYTHONPATH=/opt/osrdyne/app
# The class data sharing archive, with which Spark starts faster. It is valid for this Java, this PySpark and their paths.
RUN osrdyne spark warm-archive --directory /opt/osrdyne/share/osrdyne/class-data
# A number, so that Kubernetes can see that it is not root.
USER 10001:10001
WORKDIR /home/osrdyne
# Whether Spark's Java process runs, for operators and dashboards. osrdyne itself uses the worker's reports over AMQP.
HEALTHCHECK --interval=30s --timeout=5s --start-period=2m CMD grep -qsz '^/opt/java/' /proc/[0-9]*/cmdline
CMD ["osrdyne-worker", "osrdyne_worker.pipelines.sql:app"]
