"""The RPC client: `AsyncClient` for asyncio, `Client` for everything else, and the errors a request can end with."""

from __future__ import annotations

from osrdyne.client.aio import AsyncClient as AsyncClient
from osrdyne.client.aio import ConnectionStatus as ConnectionStatus
from osrdyne.client.blocking import Client as Client
from osrdyne.client.errors import ClientClosed as ClientClosed
from osrdyne.client.errors import ConnectionLost as ConnectionLost
from osrdyne.client.errors import DeliveryLimitReached as DeliveryLimitReached
from osrdyne.client.errors import ErrorBody as ErrorBody
from osrdyne.client.errors import InvalidRequest as InvalidRequest
from osrdyne.client.errors import NoCapacity as NoCapacity
from osrdyne.client.errors import NoRoute as NoRoute
from osrdyne.client.errors import NotRunning as NotRunning
from osrdyne.client.errors import PoolNotFound as PoolNotFound
from osrdyne.client.errors import QueueFull as QueueFull
from osrdyne.client.errors import RequestCancelled as RequestCancelled
from osrdyne.client.errors import RequestError as RequestError
from osrdyne.client.errors import RequestExpired as RequestExpired
from osrdyne.client.errors import RequestFailed as RequestFailed
from osrdyne.client.errors import RequestPoisoned as RequestPoisoned
from osrdyne.client.errors import RequestRefused as RequestRefused
from osrdyne.client.errors import RequestRejected as RequestRejected
from osrdyne.client.errors import RequestTimeout as RequestTimeout
from osrdyne.client.errors import StartFailed as StartFailed
from osrdyne.client.errors import UnknownStatus as UnknownStatus
from osrdyne.client.poison import PoisonClient as PoisonClient
from osrdyne.client.poison import PoisonEntry as PoisonEntry
from osrdyne.client.poison import PoisonOutcome as PoisonOutcome
from osrdyne.client.reply import Reply as Reply
from osrdyne.protocol.messages import ARROW_TYPE as ARROW_TYPE
