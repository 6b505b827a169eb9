"""The runtime of a worker process: broker connection, requests, replies, activity, control. No Spark in it."""
