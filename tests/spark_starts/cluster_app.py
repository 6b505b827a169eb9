"""An application whose jobs run on a cluster: a query, a Python UDF, and jobs that hold executors."""

import os
import time

from pydantic import BaseModel

from osrdyne_worker import App, Call
from osrdyne_worker.spark.session import SparkSessions

app = App(sessions=SparkSessions())


class Hold(BaseModel):
    """`tasks` tasks that sleep for `seconds`, each in a file system where it leaves its process id."""

    tasks: int
    seconds: float
    directory: str


@app.handler("/sum")
def sum_of(call: Call) -> int:
    return int(call.context.session.sql("select sum(id) from range(1000)").collect()[0][0])


@app.handler("/udf")
def udf(call: Call) -> list[str]:
    from pyspark.sql.functions import udf as to_udf

    twice = to_udf(lambda text: text * 2)
    frame = call.context.session.createDataFrame([("a",), ("b",)], "text string")
    return [row[0] for row in frame.select(twice("text")).collect()]


@app.handler("/hold")
def hold(call: Call, request: Hold) -> int:
    directory, seconds = request.directory, request.seconds

    def sleep(number: int) -> int:
        # Executors are forks of a daemon of Python: its parent's parent is the JVM.
        with open(os.path.join(directory, str(number)), "w", encoding="utf-8") as file:  # noqa: PTH118, PTH123
            file.write(str(os.getpid()))
        time.sleep(seconds)
        return number

    context = call.context.session.sparkContext
    return int(context.parallelize(range(request.tasks), request.tasks).map(sleep).sum())
