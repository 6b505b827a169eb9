"""Routes whose time-to-live is above the pool's default: queues keep their requests for as long."""

from managed_pool import REST, change, managed, managing

from osrdyne.testing.fakes.stack import Stack, leading

DAY = 86_400
LONG = {"route": "FROM /messages/* WHERE level = 'archive' INTO $upstream", "timeToLiveSecs": DAY}


def queue_ttl(stack: Stack) -> object:
    """Milliseconds for which the policy lets request queues keep a request."""
    policy = stack.broker.policies[stack.names.policy]
    return policy.definition["message-ttl"]


async def test_queues_keep_requests_for_as_long_as_some_route_allows_or_allowed(clock, broker):
    async with managing(clock, broker, rest=REST) as stack:
        usual = queue_ttl(stack)
        assert (await change(stack, rest=REST, long=LONG)).warnings == ()
        assert (usual, queue_ttl(stack)) == (managed().requests.ttl * 1000, DAY * 1000)
    async with leading(clock, broker=broker, settings=managed()) as stack:
        assert queue_ttl(stack) == DAY * 1000
        await change(stack, rest=REST)
        assert queue_ttl(stack) == DAY * 1000


async def test_ttl_above_the_maximum_of_the_pool_is_warned_about(clock, broker):
    async with managing(clock, broker) as stack:
        changed = await change(stack, rest={"route": REST, "timeToLiveSecs": 8 * DAY})
        [warning] = changed.warnings
        assert warning.path == "routes.rest.timeToLiveSecs"
        assert queue_ttl(stack) == 7 * DAY * 1000
