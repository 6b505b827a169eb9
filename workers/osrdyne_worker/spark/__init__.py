"""Spark in a worker: its session and jobs, and what a query needs. Only `spark` and `pipelines` import pyspark."""
