"""Faults planted in the kernel, and the tests that must find each of them.

A mutant is one change of one place. `tests` are files of the tier `test` unless a comment says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

POOL = "tests/component/pool/"
QUEUES = POOL + "test_request_queues_loop.py"
GROUPS = POOL + "test_worker_groups.py"
PLANNING = "tests/unit/pool/test_pool_planning.py"
UNSAFE = "tests/component/lifecycle/test_unsafe_variants.py"
ORPHANS = "tests/component/processors/test_orphans.py"
INGRESS = "tests/component/processors/test_ingress.py"
TOKEN = "tests/component/broker/test_token_channel.py"
LEADER = "tests/integration/test_leader_token.py"
ATTEMPTS = "tests/component/processors/test_delivery_attempts.py"
PROBES = "tests/unit/broker/test_probe_decisions.py"
WORKER = "tests/component/worker/"
PLAN_TESTS = "tests/unit/worker/pipelines/test_plan_guard.py"

PLAN = "osrdyne/pool/queues/plan.py"
LOOP = "osrdyne/pool/queues/loop.py"
WORKERS_PLAN = "osrdyne/pool/workers/plan.py"
SAFE_DELETE = "osrdyne/broker/queues/safe_delete.py"
FORWARDER = "osrdyne/processors/requests/forwarder.py"
TOKEN_CODE = "osrdyne/broker/leadership/token.py"
PROCESSOR = "workers/osrdyne_worker/requests/processor.py"
INTAKE = "workers/osrdyne_worker/requests/intake.py"
PLAN_GUARD = "workers/osrdyne_worker/pipelines/guard/plan_guard.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`name`: what goes wrong. `old` occurs once in `file`, and becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    # --- the queue loop
    Mutant(
        "a queue that was never bound in this term is not unbound",
        PLAN,
        "if queue.binding is not Binding.UNBOUND or queue.unbound_at is None:",
        "if queue.binding is Binding.BOUND:",
        (PLANNING, QUEUES),
    ),
    Mutant(
        "the settle time is left out",
        PLAN,
        "if now < queue.unbound_at + settle_delay:",
        "if now < queue.unbound_at:",
        (PLANNING, QUEUES),
    ),
    Mutant(
        "a queue with workers is deleted", PLAN, "    if not workers.is_empty:\n", "    if False:\n", (PLANNING, QUEUES)
    ),
    Mutant(
        "a queue is bound while its worker is stopped",
        PLAN,
        "QueueStep.WAIT_FOR_STOP if workers.stopping else QueueStep.BIND",
        "QueueStep.BIND",
        (PLANNING, QUEUES),
    ),
    Mutant(
        "a total from before the end of the workers counts as evidence",
        PLAN,
        "return max(settled, workers.empty_since)",
        "return min(settled, workers.empty_since)",
        (PLANNING, QUEUES),
    ),
    Mutant(
        "a queue with messages is deleted",
        PLAN,
        "return QueueStep.KEEP if messages else QueueStep.DELETE",
        "return QueueStep.DELETE",
        (PLANNING, QUEUES),
    ),
    Mutant(
        "a queue counts as bound before bind-ok",
        LOOP,
        "                await self._queue_commands.bind(key)\n                now = self._clock.monotonic()\n",
        "                self._queue_status.update(key, binding=Binding.BOUND, unbound_at=None)\n"
        "                await self._queue_commands.bind(key)\n                now = self._clock.monotonic()\n",
        (QUEUES, UNSAFE),
    ),
    Mutant(
        "a queue counts as bound until unbind-ok",
        LOOP,
        "self._queue_status.update(key, binding=Binding.UNKNOWN, unbound_at=None, unverified=False)\n"
        "                await self._queue_commands.unbind(key)",
        "await self._queue_commands.unbind(key)",
        (QUEUES, UNSAFE),
    ),
    Mutant(
        "a group whose queue holds requests is not required again",
        LOOP,
        "            self._tracker.require_worker_group(key)  # requests are in it: serve them",
        "            pass",
        (QUEUES,),
    ),
    Mutant(
        "a listed queue counts as bound",
        LOOP,
        "            self._queue_status.update(key, exists=True, binding=Binding.UNKNOWN, unbound_at=None)\n\n"
        "    def note_missing",
        "            self._queue_status.update(key, exists=True, binding=Binding.BOUND, unbound_at=None)\n\n"
        "    def note_missing",
        (QUEUES,),
    ),
    # --- safe delete
    Mutant("a ready message is overlooked", SAFE_DELETE, "if info.ready > 0:", "if info.ready > 1:", (PROBES,)),
    Mutant("a consumer is overlooked", SAFE_DELETE, "if info.consumers > 0:", "if info.consumers > 1:", (PROBES,)),
    Mutant(
        "a delivery to the probe is overlooked",
        SAFE_DELETE,
        "if deliveries or first.ready or second.ready:",
        "if first.ready or second.ready:",
        (PROBES,),
    ),
    Mutant(
        "one answer of a queue without a leader is enough",
        SAFE_DELETE,
        "if first == second == PROBE_ALONE:",
        "if second == PROBE_ALONE:",
        (PROBES,),
    ),
    Mutant(
        "what the probe received is dropped",
        SAFE_DELETE,
        "        await give_back(delivery)\n",
        "",
        (PROBES, QUEUES, UNSAFE),
    ),
    # --- the forwarder
    Mutant(
        "a request does not hold its group",
        FORWARDER,
        "                self._tracker.hold(one.key)\n",
        "",
        (ORPHANS, INGRESS, UNSAFE),
    ),
    Mutant(
        "a request is acknowledged before its copies are confirmed",
        FORWARDER,
        "                    refused = await publishing\n",
        "                    refused = None\n",
        ("tests/component/processors/test_ingress_splitting.py", INGRESS),
    ),
    Mutant(
        "the group is released before its request is published",
        FORWARDER,
        "        request, rest = routed[0], routed[1:]\n        try:\n",
        "        request, rest = routed[0], routed[1:]\n        self._release(routed)\n        try:\n",
        (ORPHANS, INGRESS, UNSAFE, "tests/component/lifecycle/test_histories.py"),
    ),
    Mutant(
        "a request is published to a queue that is not bound",
        FORWARDER,
        "            if not self._queue_status[routed.key].is_bound:\n                # Never longer",
        "            if False:\n                # Never longer",
        (ORPHANS, INGRESS),
    ),
    Mutant(
        "a request waits for its bind beyond its deadline",
        FORWARDER,
        "routed.deadline.at_ms, self._clock)",
        "routed.deadline.at_ms * 2, self._clock)",
        (ATTEMPTS, ORPHANS, INGRESS),
    ),
    Mutant(
        "an unexpected error loses the request",
        FORWARDER,
        " or refusal is FAILED:\n                await self._dead_letter(orphan.delivery)",
        " or refusal is FAILED:\n                await self._acknowledge(orphan.delivery)",
        (ORPHANS, INGRESS, "tests/component/processors/test_error_boundary.py"),
    ),
    Mutant(
        "a full queue answers nothing",
        FORWARDER,
        "                    return FULL\n",
        "                    return None\n",
        (ATTEMPTS, ORPHANS, INGRESS),
    ),
    Mutant(
        "requests behind one that failed overtake it",
        FORWARDER,
        "                ticket.hold_back()\n",
        "",
        ("tests/component/processors/test_ingress_order.py", INGRESS),
    ),
    Mutant(
        "a publish without a confirm is not marked as a possible duplicate",
        FORWARDER,
        "                    maybe_delivered = True\n",
        "",
        (INGRESS, ORPHANS, "tests/component/processors/test_ingress_order.py"),
    ),
    # --- the leader token
    Mutant(
        "any message of the leader queue counts as the renewed token",
        TOKEN_CODE,
        "if awaited is not None and self._is_message(delivery, awaited[0]):",
        "if awaited is not None:",
        (TOKEN, LEADER),
    ),
    Mutant(
        "the next term has the number of the last one",
        TOKEN_CODE,
        "own = Token(1 + _last_used(",
        "own = Token(_last_used(",
        (LEADER, "tests/component/daemon/test_takeover.py"),
    ),
    Mutant(
        "a token of another user is believed",
        TOKEN_CODE,
        "if token is None or (self.user is not None and delivery.properties.user_id != self.user):",
        "if token is None:",
        (LEADER,),
    ),
    Mutant(
        "a term ahead of the clock is believed",
        TOKEN_CODE,
        "return token if is_plausible_term(token.term, now=limit) else None",
        "return token",
        (LEADER,),
    ),
    Mutant(
        "a new leader does not wait for an earlier one",
        TOKEN_CODE,
        "        await self._clock.sleep(self._times.silence)\n",
        "",
        (LEADER, "tests/component/broker/test_leader_session.py"),
    ),
    Mutant(
        "a command after the loss of the token is sent",
        TOKEN_CODE,
        "return self._lost or self._channel.is_closed or (self._consumer is not None and self._consumer.ended)",
        "return False",
        (TOKEN, LEADER),
    ),
    Mutant(
        "the lease counts from the answer",
        TOKEN_CODE,
        "        self._led_at = sent_at\n        for command in batch:",
        "        self._led_at = self._clock.monotonic()\n        for command in batch:",
        (TOKEN, LEADER),
    ),
    # --- the worker groups
    Mutant(
        "a worker of a key without a group is left alone",
        WORKERS_PLAN,
        'return actions + [Stop(instance.instance_id, "the group is not desired") for instance in running]',
        "return actions",
        (PLANNING, GROUPS),
    ),
    Mutant(
        "a worker is started in a slot that is not free",
        WORKERS_PLAN,
        "taken = {instance.slot for instance in observed.instances}",
        "taken = {instance.slot for instance in staying}",
        (PLANNING, GROUPS, "tests/unit/pool/test_pool_workers.py"),
    ),
    Mutant(
        "a worker is started before its queue exists",
        WORKERS_PLAN,
        "if not observed.queue_exists or (observed.is_ending and slots):",
        "if observed.is_ending and slots:",
        (PLANNING, GROUPS),
    ),
    Mutant(
        "the back-off of a start is left out",
        WORKERS_PLAN,
        "if observed.back_off_until is not None and now < observed.back_off_until:",
        "if False:",
        (PLANNING, GROUPS, "tests/unit/pool/test_pool_workers.py"),
    ),
    # --- the worker: intake
    Mutant(
        "a request that arrives after the stop runs",
        INTAKE,
        "                await delivery.nack(requeue=True)\n                continue\n",
        "                pass\n",
        (WORKER + "test_worker_priorities.py", WORKER + "test_worker_processor.py"),
    ),
    Mutant(
        "requests that have not begun are kept by a stopped intake",
        INTAKE,
        "        self._processor.requeue(channel=channel)\n",
        "",
        (WORKER + "test_worker_priorities.py", WORKER + "test_worker_processor.py"),
    ),
    # --- the worker: processor
    Mutant(
        "a suspect runs beside other requests",
        PROCESSOR,
        "await (self._run_alone(job) if job.is_suspect else self._run_in_slot(job))",
        "await self._run_in_slot(job)",
        (WORKER + "test_worker_suspects.py",),
    ),
    Mutant(
        "the deadline of a request is not armed",
        PROCESSOR,
        "        if result is None and left is not None:\n            self._arm(job, left)",
        "        if False:\n            self._arm(job, left)",
        (WORKER + "test_worker_deadlines.py", WORKER + "test_rates_of_events.py", WORKER + "test_data_versions.py"),
    ),
    Mutant(
        "an answer goes to an address that is not allowed",
        PROCESSOR,
        "        reason = self._addresses.refuse(request.reply_to)\n",
        "        reason = None\n",
        (WORKER + "test_worker_processor.py", "tests/security/test_forged_messages.py"),  # the second: tier `process`
    ),
    Mutant(
        "a failed delivery is not counted",
        PROCESSOR,
        "                await job.reject()\n",
        "                await job.nack()\n",
        (WORKER + "test_worker_processor.py", WORKER + "test_worker_suspects.py"),
    ),
    Mutant(
        "the caller's cancel is ignored",
        PROCESSOR,
        "early_result(interruption=job.interruption, was_cancelled=was_cancelled, left=left)",
        "early_result(interruption=job.interruption, was_cancelled=False, left=left)",
        (WORKER + "test_whole_worker.py", WORKER + "test_worker_processor.py"),
    ),
    # --- the guard
    Mutant(
        "a query may name a view of another key",
        PLAN_GUARD,
        "if name[0].lower() not in views and name[0].lower() not in common:",
        "if False:",
        (PLAN_TESTS,),
    ),
    Mutant(
        "a function that reads data is allowed",
        PLAN_GUARD,
        "if not isinstance(parts, list) or len(parts) != 1 or name not in allowed:",
        "if not isinstance(parts, list) or len(parts) != 1:",
        (PLAN_TESTS,),
    ),
    Mutant(
        "an expression that runs code is allowed",
        PLAN_GUARD,
        'if package.split(".")[0] == "expressions" and name not in _FORBIDDEN_EXPRESSIONS:',
        'if package.split(".")[0] == "expressions":',
        (PLAN_TESTS,),
    ),
    Mutant(
        "the analysed plan may have a view of another key",
        PLAN_GUARD,
        'if _short_class(node) == "View" and node.get("ours") is not True:',
        "if False:",
        (PLAN_TESTS,),
    ),
    Mutant(
        "a node that is null is not refused",
        PLAN_GUARD,
        '        if node["nulls"]:\n',
        "        if False:\n",
        (PLAN_TESTS,),
    ),
)
