"""The SQL pipeline as it started before: the JVM after all imports, views one after the other, tables cached before
the first answer.

The floor of the benchmark `cold_start`, which also gives its JVM no class data sharing archive.
"""

from osrdyne_worker.app.app import importing

importing.set(None)  # before the module that would start the JVM

from osrdyne_worker import App, Context  # noqa: E402
from osrdyne_worker.pipelines import sql as pipeline  # noqa: E402
from osrdyne_worker.pipelines.views import loading  # noqa: E402

CACHE_TIMEOUT = 300.0

app = App(sessions=pipeline.sessions)
app.handler("/sql", abandonable=True)(pipeline.sql)
loading.PARALLEL_VIEWS = 1


@app.on_start
def open_data(context: Context) -> pipeline.SqlData:
    data = pipeline.open_data(context)
    data.caching.wait(CACHE_TIMEOUT)
    return data
