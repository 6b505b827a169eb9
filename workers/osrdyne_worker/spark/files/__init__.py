"""Files in any file system of Hadoop: list, read and write them, and their schemas, without a Spark job."""
