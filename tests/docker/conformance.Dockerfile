# The worker of the conformance suite, which needs nothing but Python. Its user has a name, not a number, on purpose.
FROM python:3.11-slim-bookworm
RUN useradd --uid 4711 worker
COPY osrdyne /app/osrdyne
ENV PYTHONPATH=/app
USER worker
CMD ["python", "-m", "osrdyne.testing.conformance_worker"]
