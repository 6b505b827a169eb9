"""Deprecated alias of `osrdyne_worker.app.app`, for one release. Import these names from `osrdyne_worker`."""

import warnings

from osrdyne_worker.app.app import *  # noqa: F403

warnings.warn("osrdyne_worker.runtime.app is deprecated; import from osrdyne_worker", DeprecationWarning, stacklevel=2)
