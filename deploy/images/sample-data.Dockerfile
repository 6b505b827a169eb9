# Generates the sample data of docker-compose.yml: TPC-H tables as Parquet, below /data. Runs once and ends.
ARG BASE=python:3.11-slim-bookworm
FROM $BASE
COPY deploy/images/requirements-sample-data.txt /
RUN python -m venv /opt/tpch \
 && /opt/tpch/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r /requirements-sample-data.txt \
 && mkdir /data && chown 10001:10001 /data
USER 10001:10001
ENV SCALES="0.001 0.01"
CMD ["sh", "-ec", "for scale in $SCALES; do [ -e /data/tpch/sf=$scale ] && continue; mkdir -p /data/tpch; rm -rf /data/tpch/.new; /opt/tpch/bin/tpchgen-cli parquet --scale-factor $scale --output-dir /data/tpch/.new; mv /data/tpch/.new /data/tpch/sf=$scale; done"]
