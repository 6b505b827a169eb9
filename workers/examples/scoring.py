"""A worker on Spark with answers as Spark users write them: DataFrames, a pandas UDF, a model, look-ups in batches.

osrdyne-worker workers.examples.scoring:app

The data is made from the key, which must be a whole number: key 3 has 3,000 customers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pydantic import BaseModel, Field

from osrdyne_worker import App, Call, Context, RequestError
from osrdyne_worker.spark.session import SparkSessions

app = App(sessions=SparkSessions())


@dataclass(frozen=True)
class Model:
    """A linear model: the score of a customer is `weights · (age, spent) + bias`."""

    weights: tuple[float, float]
    bias: float

    def score(self, age: Any, spent: Any) -> Any:
        return self.weights[0] * age + self.weights[1] * spent + self.bias


class Lookup(BaseModel):
    id: int


class Segment(BaseModel):
    minimum_age: int = Field(0, ge=0)


@app.on_start
def load(context: Context) -> Model:
    """Make the customers of this key, and fit a model to them. Views made here are in the session of each request."""
    if not context.key.isdecimal():
        raise RequestError(f"The key {context.key!r} is not a whole number of thousands.")
    rows = int(context.key) * 1000
    customers = context.session.range(rows).selectExpr("id", "20 + id % 60 as age", "cast(id % 100 as double) as spent")
    customers.cache().createOrReplaceTempView("customers")
    sample = context.session.table("customers").limit(1000).toPandas()
    inputs = np.column_stack([sample["age"], sample["spent"], np.ones(len(sample))])
    fitted = np.linalg.lstsq(inputs, 2 * sample["age"] - sample["spent"] + 5, rcond=None)[0]
    return Model((float(fitted[0]), float(fitted[1])), float(fitted[2]))


@app.handler("/segment", row_limit=100)
def segment(call: Call, request: Segment) -> Any:
    """A DataFrame of Spark: the customers of at least an age."""
    customers = call.session.table("customers")
    customers.where(customers.age >= request.minimum_age).createOrReplaceTempView("segment")  # of this request alone
    return call.session.sql(
        "select age, count(*) as customers, sum(spent) as spent from segment group by age order by age"
    )


@app.handler("/scores", row_limit=1000)
def scores(call: Call) -> Any:
    """A DataFrame with a column that a pandas UDF computes in Spark's Python processes."""
    from pyspark.sql import functions as F

    model: Model = call.context.state

    @F.pandas_udf("double")
    def score(age: pd.Series, spent: pd.Series) -> pd.Series:
        return model.score(age, spent)

    return call.session.table("customers").select("id", score("age", "spent").alias("score")).orderBy("id")


@app.handler("/best")
def best(call: Call) -> pd.DataFrame:
    """A DataFrame of pandas: the ten customers with the best scores."""
    model: Model = call.context.state
    customers = call.session.table("customers").toPandas()
    customers["score"] = model.score(customers["age"], customers["spent"])
    return customers.nlargest(10, "score")[["id", "score"]]


@app.handler("/all", row_limit=1_000_000)
def everything(call: Call) -> Iterator[pa.RecordBatch]:
    """Record batches of at most 1,000 rows; Spark hands over one partition after the other."""
    model: Model = call.context.state
    rows = call.session.table("customers").toLocalIterator(prefetchPartitions=True)
    while part := list(islice(rows, 1000)):
        scored = [model.score(row.age, row.spent) for row in part]
        yield pa.record_batch({"id": [row.id for row in part], "score": scored})


@app.batch_handler("/customer", max_size=256, max_wait="20ms")
def customer(calls: list[Call], requests: list[Lookup]) -> list[object]:
    """Point look-ups: one query of Spark for all calls of a batch."""
    model: Model = calls[0].context.state
    wanted = sorted({request.id for request in requests})
    customers = calls[0].session.table("customers")
    found = {row.id: row for row in customers.where(customers.id.isin(wanted)).collect()}
    answers: list[object] = []
    for request in requests:
        row = found.get(request.id)
        if row is None:
            answers.append(RequestError(f"There is no customer {request.id}.", code=404, error_code="no_customer"))
        else:
            answers.append({"id": row.id, "age": row.age, "score": model.score(row.age, row.spent)})
    return answers
