# The worker of the conformance suite. Its user has a name, not a number, on purpose.
FROM python:3.11-slim-bookworm
RUN useradd --uid 4711 worker
# For the process of pooled workers and its figures of memory; the other worker needs nothing but Python.
RUN pip install -q --no-cache-dir "pydantic>=2.9" "structlog>=24"
COPY osrdyne /app/osrdyne
ENV PYTHONPATH=/app
USER worker
CMD ["python", "-m", "osrdyne.testing.conformance_worker"]
