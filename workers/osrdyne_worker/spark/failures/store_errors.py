"""Names the settings to check when S3 refuses a request or cannot be reached. Reads text only; imports no pyspark.

Used by `errors`. The messages of S3A name the path and the status of the answer, and no setting.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_STATUS = re.compile(r"\(Service: S3, Status Code: (\d{3})")
_PATH = re.compile(r"s3a://([^/\s:'`\"]+)")
_PREFIX = "worker.spark_conf.spark.hadoop.fs.s3a"
_NO_CREDENTIALS = re.compile(r"NoAuthWithAWSException|NoAwsCredentialsException|Unable to load credentials")
_UNKNOWN_STORE = re.compile(r"UnknownStoreException|NoSuchBucket|The specified bucket does not exist")
_UNREACHABLE = re.compile(
    r"HttpHostConnectException|ConnectException|UnknownHostException|ConnectTimeoutException|SocketTimeoutException"
    r"|Unable to execute HTTP request|Connection refused"
)


@dataclass(frozen=True, slots=True)
class StoreFailure:
    """`message` names the settings to check; `is_missing`: the bucket does not exist."""

    message: str
    is_missing: bool = False


def store_failure(text: str) -> StoreFailure | None:
    """The failure of S3 that a message of S3A is about; None for any other message."""
    path, status = _PATH.search(text), _STATUS.search(text)
    if path is None and status is None:
        return None
    bucket = path[1] if path is not None else None
    named = f"the bucket {bucket}" if bucket is not None else "the bucket"
    if _UNKNOWN_STORE.search(text):
        return StoreFailure(
            f"{named[0].upper()}{named[1:]} does not exist in this store: check its name, and {_PREFIX}.endpoint.",
            is_missing=True,
        )
    if _NO_CREDENTIALS.search(text):
        return StoreFailure(
            f"There are no credentials for {named}: set {_PREFIX}.access.key and {_PREFIX}.secret.key, or run the "
            "worker where AWS provides them."
        )
    if status is not None and status[1] in ("401", "403"):
        return StoreFailure(
            f"S3 refused access to {named} ({status[1]}): check {_PREFIX}.access.key and {_PREFIX}.secret.key, and "
            "what their user may do."
        )
    if status is None and _UNREACHABLE.search(text):
        return StoreFailure(f"S3 cannot be reached for {named}: check {_PREFIX}.endpoint.")
    return None
