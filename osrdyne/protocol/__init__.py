"""The wire contract: names, messages, statuses, activity, control, environment, deadlines.

Client, worker and controller share it unchanged. Pure, except that `environment` reads the file or standard input with
the AMQP URI, and `spark_master.find_reachable` opens sockets. Only `pooled` needs more than the standard library
(pydantic). Source: docs/reference/protocol, and the OSRD reference.
"""
