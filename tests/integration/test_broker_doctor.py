"""`doctor`'s checks of a real RabbitMQ, as it is and as it should not be."""

import secrets
from urllib.parse import urlsplit

import pytest
from broker_api import http_client
from pydantic import SecretStr

from osrdyne.broker.doctor.run import run_broker_checks
from osrdyne.broker.management.client import vhost_of
from osrdyne.config.models import BrokerSettings, PoolSettings, Settings
from osrdyne.dev.rabbitmq.node_files import free_ports
from osrdyne.findings import Finding
from osrdyne.protocol.uri import with_user


@pytest.fixture
def settings(broker_settings, pool_id):
    broker = broker_settings.model_copy(update={"scoped_credentials": True})
    return Settings(broker=broker, pool=PoolSettings(id=pool_id))


@pytest.fixture
async def limited_user(broker_settings):
    """A user that may log in to the HTTP API and nothing else."""
    user, password = f"limited-{secrets.token_hex(4)}", secrets.token_hex(8)
    amqp_uri, http_uri = broker_settings.uri.get_secret_value(), broker_settings.effective_management_uri()
    async with http_client(http_uri) as client:
        await client.put(f"/api/users/{user}", json={"password": password, "tags": "management"})
        little = {"configure": "^$", "write": "^amq\\.default$", "read": "^$"}
        await client.put(f"/api/permissions/{vhost_of(amqp_uri)}/{user}", json=little)
        amqp_uri, http_uri = (SecretStr(with_user(uri, user, password)) for uri in (amqp_uri, http_uri))
        yield BrokerSettings(uri=amqp_uri, management_uri=http_uri)
        await client.delete(f"/api/users/{user}")


def wrong(findings: list[Finding]) -> set[str]:
    return {finding.subject for finding in findings if not finding.ok}


async def test_a_fresh_rabbitmq_is_fine_and_nothing_is_left_on_it(settings, management):
    findings = await run_broker_checks(settings)
    assert wrong(findings) == set()
    assert {"RabbitMQ version", "permissions", "clock", "message size"} <= {finding.subject for finding in findings}
    assert await management.list_queues(f"{settings.pool.id}-") == []


async def test_missing_rights_of_a_user_are_listed(limited_user, pool_id):
    findings = await run_broker_checks(Settings(broker=limited_user, pool=PoolSettings(id=pool_id)))
    assert {"user tags", "permissions"} <= wrong(findings)
    password = urlsplit(limited_user.uri.get_secret_value()).password
    assert password and password not in repr(findings)


async def test_no_rabbitmq_at_all_is_two_findings_with_remedies():
    amqp_port, management_port = free_ports(2)
    uris = f"amqp://user:s3cret@127.0.0.1:{amqp_port}/", f"http://user:s3cret@127.0.0.1:{management_port}"
    broker = BrokerSettings(uri=SecretStr(uris[0]), management_uri=SecretStr(uris[1]))
    findings = await run_broker_checks(Settings(broker=broker))
    assert [(finding.subject, finding.ok) for finding in findings] == [("AMQP", False), ("HTTP API", False)]
    assert "rabbitmq_management" in findings[1].message
    assert "s3cret" not in repr(findings)
