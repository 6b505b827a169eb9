# The daemon with the drivers that need no host of their own: docker and kubernetes.
#   docker build -f deploy/images/controller.Dockerfile -t osrdyne/controller .
# A digest pins it wholly: --build-arg BASE=python@sha256:…
ARG BASE=python:3.11-slim-bookworm
FROM $BASE AS build
WORKDIR /src
COPY deploy/images/constraints.txt ./
RUN python -m venv /opt/osrdyne && python -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir -c constraints.txt hatchling
# What it depends on is a layer of its own: a change of the code does not install it again.
COPY pyproject.toml README.md LICENSE ./
RUN mkdir -p osrdyne workers/osrdyne_worker \
 && touch osrdyne/__init__.py workers/osrdyne_worker/__init__.py \
 && /opt/osrdyne/bin/pip install --no-cache-dir -c constraints.txt '.[docker,kubernetes]' \
 && /opt/osrdyne/bin/pip uninstall --yes osrdyne
COPY osrdyne osrdyne
COPY workers/osrdyne_worker workers/osrdyne_worker
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/osrdyne/bin/pip install --no-cache-dir --no-deps /wheels/osrdyne-*.whl

FROM $BASE
RUN groupadd --gid 10001 osrdyne \
 && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin osrdyne
COPY --from=build /opt/osrdyne /opt/osrdyne
ENV PATH=/opt/osrdyne/bin:$PATH PYTHONUNBUFFERED=1
# A number, so that Kubernetes can see that it is not root.
USER 10001:10001
WORKDIR /home/osrdyne
EXPOSE 4242
# The process is alive. Whether all is well is /ready, which is no reason to end it.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s CMD ["python", "-c", \
 "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ.get('OSRDYNE__API__PORT', 4242)}/health\", timeout=4)"]
ENTRYPOINT ["osrdyne"]
CMD ["run"]
