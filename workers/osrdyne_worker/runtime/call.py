"""Deprecated alias of `osrdyne_worker.app.call`, for one release. Import these names from `osrdyne_worker`."""

import warnings

from osrdyne_worker.app.call import *  # noqa: F403
from osrdyne_worker.app.errors import RequestError as RequestError

warnings.warn("osrdyne_worker.runtime.call is deprecated; import from osrdyne_worker", DeprecationWarning, stacklevel=2)
