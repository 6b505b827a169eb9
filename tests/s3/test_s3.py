"""Datasets and exports of the SQL pipeline on S3: `make test-s3`."""

from pathlib import Path

import pytest
from remote_files import RemoteFilesSuite, ask, export, spark_session, written
from s3_server import BUCKET, S3Server, s3a_jars

from osrdyne.dev.rabbitmq.node_files import free_ports
from osrdyne_worker import RequestError

pytestmark = [pytest.mark.usefixtures("java"), pytest.mark.timeout(1800)]

CACHE = Path(__file__).parents[2] / "build" / "s3"
ROOT = f"s3a://{BUCKET}"
WRONG_SECRET = "a-wrong-secret-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    CACHE.mkdir(parents=True, exist_ok=True)
    started = S3Server(tmp_path_factory.mktemp("s3"), cache=CACHE)
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def session(server):
    [closed] = free_ports(1)
    conf = {
        "spark.driver.extraClassPath": s3a_jars(CACHE),
        "spark.hadoop.fs.s3a.endpoint": server.address,
        "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": server.access_key,
        "spark.hadoop.fs.s3a.secret.key": server.secret_key,
        # Buckets with faults of their own.
        "spark.hadoop.fs.s3a.bucket.refused.secret.key": WRONG_SECRET,
        "spark.hadoop.fs.s3a.bucket.unknown.access.key": "AKIAUNKNOWN",
        "spark.hadoop.fs.s3a.bucket.unreachable.endpoint": f"http://127.0.0.1:{closed}",
        "spark.hadoop.fs.s3a.bucket.unreachable.attempts.maximum": "1",
        "spark.hadoop.fs.s3a.bucket.unreachable.retry.limit": "1",
        "spark.hadoop.fs.s3a.bucket.unreachable.retry.interval": "10ms",
    }
    with spark_session(conf) as built:
        yield built


FAULTS = {
    "missing bucket": ("nowhere", 404, "The bucket nowhere does not exist"),
    "wrong secret key": ("refused", 503, "spark.hadoop.fs.s3a.secret.key"),
    "unknown access key": ("unknown", 503, "spark.hadoop.fs.s3a.access.key"),
    "no server": ("unreachable", 503, "spark.hadoop.fs.s3a.endpoint"),
}


class TestS3(RemoteFilesSuite):
    @pytest.fixture
    def base(self):
        return ROOT

    @pytest.mark.parametrize("fault", FAULTS)
    @pytest.mark.parametrize("watch", [False, True], ids=["not watched", "watched"])
    def test_fault_of_a_dataset_names_its_setting(self, server, make_call, fault, watch):
        bucket, code, named = FAULTS[fault]
        with pytest.raises(RequestError) as caught:
            ask(make_call(f"s3a://{bucket}/data", watch=watch))
        assert named in caught.value.message
        assert caught.value.code == code
        assert_is_clean(server, caught.value.message)

    @pytest.mark.parametrize("fault", FAULTS)
    def test_fault_of_an_export_names_its_setting(self, session, server, make_call, fault):
        bucket, _, named = FAULTS[fault]
        call = make_call(written(session, f"{ROOT}/source", 100), exports=f"s3a://{bucket}/exports")
        with pytest.raises(RequestError) as caught:
            export(call)
        assert named in caught.value.message
        assert_is_clean(server, caught.value.message)


def assert_is_clean(server: S3Server, message: str) -> None:
    assert "\n" not in message
    assert not [secret for secret in (server.secret_key, WRONG_SECRET, server.access_key) if secret in message]
