"""The worker side of osrdyne: a runtime that answers the requests of one key, and the pipelines that run in it.

A worker is a Python module with an `App`; `osrdyne-worker module:app` runs it. See `docs/reference/workers`.
"""

from __future__ import annotations

from osrdyne_worker.app.app import App, Context, SessionFactory
from osrdyne_worker.app.call import Answer, Call
from osrdyne_worker.app.errors import CallCancelledError, DataChangedError, RequestError

__all__ = [
    "Answer",
    "App",
    "Call",
    "CallCancelledError",
    "Context",
    "DataChangedError",
    "RequestError",
    "SessionFactory",
]
