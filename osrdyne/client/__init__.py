"""The RPC client: `AsyncClient` for asyncio, `Client` for everything else, and the errors a request can end with."""

from __future__ import annotations

from typing import Any

from osrdyne.client.aio import AsyncClient as AsyncClient
from osrdyne.client.aio import ConnectionStatus as ConnectionStatus
from osrdyne.client.blocking import Client as Client
from osrdyne.client.errors import CircuitOpenError as CircuitOpenError
from osrdyne.client.errors import ClientClosedError as ClientClosedError
from osrdyne.client.errors import ConnectionLostError as ConnectionLostError
from osrdyne.client.errors import DeliveryLimitError as DeliveryLimitError
from osrdyne.client.errors import ErrorBody as ErrorBody
from osrdyne.client.errors import ForbiddenError as ForbiddenError
from osrdyne.client.errors import InvalidRequestError as InvalidRequestError
from osrdyne.client.errors import NoCapacityError as NoCapacityError
from osrdyne.client.errors import NoRouteError as NoRouteError
from osrdyne.client.errors import NotRunningError as NotRunningError
from osrdyne.client.errors import PoolNotFoundError as PoolNotFoundError
from osrdyne.client.errors import QueueGoneError as QueueGoneError
from osrdyne.client.errors import QuotaExceededError as QuotaExceededError
from osrdyne.client.errors import RateLimitedError as RateLimitedError
from osrdyne.client.errors import RequestCancelledError as RequestCancelledError
from osrdyne.client.errors import RequestError as RequestError
from osrdyne.client.errors import RequestExpiredError as RequestExpiredError
from osrdyne.client.errors import RequestFailedError as RequestFailedError
from osrdyne.client.errors import RequestPoisonedError as RequestPoisonedError
from osrdyne.client.errors import RequestQueueFullError as RequestQueueFullError
from osrdyne.client.errors import RequestRefusedError as RequestRefusedError
from osrdyne.client.errors import RequestRejectedError as RequestRejectedError
from osrdyne.client.errors import RequestTimeoutError as RequestTimeoutError
from osrdyne.client.errors import RequestTooLargeError as RequestTooLargeError
from osrdyne.client.errors import StartFailedError as StartFailedError
from osrdyne.client.errors import StreamInterruptedError as StreamInterruptedError
from osrdyne.client.errors import UnauthorizedError as UnauthorizedError
from osrdyne.client.errors import UnknownStatusError as UnknownStatusError
from osrdyne.client.errors import renamed as _renamed
from osrdyne.client.poison import PoisonClient as PoisonClient
from osrdyne.client.poison import PoisonEntry as PoisonEntry
from osrdyne.client.poison import PoisonOutcome as PoisonOutcome
from osrdyne.client.reply import Reply as Reply
from osrdyne.protocol.messages import ARROW_TYPE as ARROW_TYPE
from osrdyne.protocol.progress import JobProgress as JobProgress
from osrdyne.protocol.progress import StartProgress as StartProgress


def __getattr__(name: str) -> Any:
    return _renamed(__name__, name, globals())
