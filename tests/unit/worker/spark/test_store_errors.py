"""What a caller reads when S3 refuses a request. The messages of a real server: tests/s3."""

from __future__ import annotations

import pytest

from osrdyne_worker.spark.failures.store_errors import store_failure

HEAD = "getFileStatus on s3a://reports/data: software.amazon.awssdk.services.s3.model"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{HEAD}.S3Exception: null (Service: S3, Status Code: 403, Request ID: x):null", "fs.s3a.secret.key"),
        (f"{HEAD}.NoSuchBucketException: no (Service: S3, Status Code: 404, Request ID: x)", "bucket reports does not"),
        ("s3a://reports/data: NoAuthWithAWSException: No AWS Credentials provided", "set worker.spark_conf.spark"),
        ("s3a://reports/data: Unable to execute HTTP request: Connection refused", "fs.s3a.endpoint"),
    ],
    ids=["refused", "no bucket", "no credentials", "no server"],
)
def test_failure_of_a_store_names_the_bucket_and_the_setting(text: str, words: str) -> None:
    failure = store_failure(text)
    assert failure is not None
    assert words in failure.message
    assert "bucket reports" in failure.message
    assert failure.is_missing == ("NoSuchBucket" in text)


@pytest.mark.parametrize(
    "text",
    [
        "[PATH_NOT_FOUND] Path does not exist: s3a://reports/data",
        "Connection refused",
        f"{HEAD}.S3Exception: slow down (Service: S3, Status Code: 503, Request ID: x)",
    ],
)
def test_other_messages_are_left_alone(text: str) -> None:
    assert store_failure(text) is None
