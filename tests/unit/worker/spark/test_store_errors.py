"""What a caller reads when S3 refuses a request. The messages of a real server: tests/s3."""

from __future__ import annotations

import pytest

from osrdyne_worker.spark.failures.store_errors import store_failure

HEAD = "getFileStatus on s3a://reports/data: software.amazon.awssdk.services.s3.model"


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        (f"{HEAD}.S3Exception: null (Service: S3, Status Code: 403, Request ID: x):null", "fs.s3a.secret.key"),
        (f"{HEAD}.NoSuchBucketException: no (Service: S3, Status Code: 404, Request ID: x)", "bucket reports"),
        ("s3a://reports/data: NoAuthWithAWSException: No AWS Credentials provided", "worker.spark_conf.spark"),
        ("s3a://reports/data: Unable to execute HTTP request: Connection refused", "fs.s3a.endpoint"),
        ("[PATH_NOT_FOUND] Path does not exist: s3a://reports/data", None),
        ("Connection refused", None),
        (f"{HEAD}.S3Exception: slow down (Service: S3, Status Code: 503, Request ID: x)", None),
    ],
    ids=["refused", "no bucket", "no credentials", "no server", "no path", "not S3", "slow"],
)
def test_failure_of_a_store_names_the_bucket_and_the_setting(text: str, setting: str | None) -> None:
    failure = store_failure(text)
    if setting is None:
        assert failure is None
    else:
        assert failure is not None
        assert setting in failure.message
        assert "bucket reports" in failure.message
        assert failure.is_missing == ("NoSuchBucket" in text)
