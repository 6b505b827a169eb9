# The daemon with the drivers for containers: docker and kubernetes.
#   docker build -f deploy/images/controller.Dockerfile -t osrdyne/controller .
# To pin the base image: --build-arg BASE=python@sha256:…
ARG BASE=python:3.11-slim-bookworm
FROM $BASE AS build
WORKDIR /src
# Every file that pip downloads has its hash here (`make requirements`). --only-binary: pip builds nothing, because it would
# install build tools without hashes. The dependencies of osrdyne are a layer of their own, so that a change of the code does
# not install them again.
COPY deploy/images/requirements-build.txt deploy/images/requirements-controller.txt ./
RUN python -m venv /opt/osrdyne && python -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r requirements-build.txt \
 && /opt/osrdyne/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r requirements-controller.txt
COPY pyproject.toml README.md LICENSE ./
COPY osrdyne osrdyne
COPY workers/osrdyne_sources workers/osrdyne_sources
COPY workers/osrdyne_worker workers/osrdyne_worker
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/osrdyne/bin/pip install --no-cache-dir --no-index --no-deps /wheels/osrdyne-*.whl \
 && /opt/osrdyne/bin/pip check

FROM $BASE
RUN groupadd --gid 10001 osrdyne \
 && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin osrdyne
COPY --from=build /opt/osrdyne /opt/osrdyne
ENV PATH=/opt/osrdyne/bin:$PATH PYTHONUNBUFFERED=1
# A number, so that Kubernetes can see that it is not root.
USER 10001:10001
WORKDIR /home/osrdyne
# Clients that use up the connections of the API make no probe fail.
ENV OSRDYNE__API__PROBE_PORT=4243
EXPOSE 4242
# Whether the process is alive. Not /ready, because a daemon that is not ready must not be restarted.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s CMD ["python", "-c", \
 "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['OSRDYNE__API__PROBE_PORT']}/health\", timeout=4)"]
ENTRYPOINT ["osrdyne"]
CMD ["run"]
