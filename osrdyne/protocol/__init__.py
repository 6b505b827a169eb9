"""The wire contract, pure: names, messages, statuses, activity, control, environment, deadlines.

No I/O and no dependency but the standard library, so that client, worker and controller share it unchanged.
The documents behind it: docs/reference/protocol (wire contract) and the OSRD reference.
"""
