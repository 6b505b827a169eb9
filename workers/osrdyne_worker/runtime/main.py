"""Deprecated alias of `osrdyne_worker.main`, for one release. Start workers with the command `osrdyne-worker`."""

import warnings

from osrdyne_worker.main import main as main

warnings.warn(
    "osrdyne_worker.runtime.main is deprecated; use osrdyne_worker.main",
    DeprecationWarning,
    stacklevel=1 if __name__ == "__main__" else 2,  # Python shows the warning only if its line is in __main__
)

if __name__ == "__main__":
    main()
