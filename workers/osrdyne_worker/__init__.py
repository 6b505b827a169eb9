"""The worker side of osrdyne: a runtime that answers the requests of one key, and the pipelines that run in it.

A worker is a Python module with an `App`; `osrdyne-worker module:app` runs it. See `docs/reference/workers`.
"""

from __future__ import annotations

from osrdyne_worker.app.app import App as App
from osrdyne_worker.app.app import Context as Context
from osrdyne_worker.app.app import SessionFactory as SessionFactory
from osrdyne_worker.app.call import Answer as Answer
from osrdyne_worker.app.call import Call as Call
from osrdyne_worker.app.call import CallCancelledError as CallCancelledError
from osrdyne_worker.app.call import RequestError as RequestError
