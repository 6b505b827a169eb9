"""The Python examples of docs/reference/python-client.md, run as they are printed, against a responder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from client_responder import responder_in_a_thread

from osrdyne.protocol.messages import ARROW_TYPE, JSON_TYPE, Request, Response

pytestmark = pytest.mark.one_rabbitmq

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "python-client.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def answer(request: Request) -> list[Response]:
    if b"drop" in request.body:
        return [Response("error", body=b'{"error": {"code": "refused", "message": "only SELECT"}}')]
    if request.accept == ARROW_TYPE:
        table, sink = pa.table({"n": [1, 2]}), pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return [Response(body=sink.getvalue().to_pybytes(), content_type=ARROW_TYPE)]
    return [Response(body=b"half", progress=True), Response(body=b'{"rows": [[42]]}', content_type=JSON_TYPE)]


def test_examples_of_the_client_page_run(broker, pool_id):
    assert len(EXAMPLES) >= 5
    page = "".join(f"exec({code!r}, {{}})\nprint('--')\n" for code in EXAMPLES)
    page = page.replace("amqp://guest:guest@localhost:5672/", broker.amqp_uri).replace('"osrdyne")', f'"{pool_id}")')
    with responder_in_a_thread(broker.amqp_uri, pool_id, answer, keys=("tpch/sf=0.01", "tpch/sf=0.1")):
        done = subprocess.run([sys.executable, "-W", "error", "-c", page], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(re.search(r"42|2|refused", shown) for shown in done.stdout.split("--")[:-1])
