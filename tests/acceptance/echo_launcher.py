"""Starts an echo worker, or fails to, key by key. A worker command for tests; its argument is a JSON file:

`{KEY: {"exit": 3, "says": "…"}}` ends at once, `{KEY: {"until": FILE}}` starts once the file exists, and
`{KEY: {"runtime": {…}}}` changes settings of the runtime.
"""

import json
import os
import sys
import time
from pathlib import Path

file = Path(sys.argv[1])
fault = json.loads(file.read_text()).get(os.environ.get("WORKER_KEY", ""), {}) if file.exists() else {}
if "exit" in fault:
    print(fault["says"], file=sys.stderr, flush=True)
    sys.exit(fault["exit"])
while "until" in fault and not Path(fault["until"]).exists():
    time.sleep(0.05)
config = json.loads(os.environ["WORKER_CONFIG"])
config["runtime"] = {**config.get("runtime", {}), **fault.get("runtime", {})}
os.environ["WORKER_CONFIG"] = json.dumps(config)
sys.argv = ["osrdyne-worker", "tests.acceptance.gated_echo:app"]
from osrdyne_worker.main import main  # noqa: E402  # after the faults, which need no import

main()
