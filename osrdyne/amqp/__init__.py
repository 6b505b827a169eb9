"""Plain AMQP: connections, channels, consumers and a confirmed publisher, shared by controller, client and worker.

Built on aiormq, the protocol layer below aio-pika (decision 0001). There is no automatic reconnection and no
re-declaration here on purpose: who owns a connection decides what losing it means. Importing the package applies the
documented patches of `pamqp_patches`.
"""

from __future__ import annotations

from osrdyne.amqp import pamqp_patches as pamqp_patches
from osrdyne.amqp.channel import Channel as Channel
from osrdyne.amqp.channel import QueueInfo as QueueInfo
from osrdyne.amqp.connection import Connection as Connection
from osrdyne.amqp.connection import ConnectionOptions as ConnectionOptions
from osrdyne.amqp.connection import connect as connect
from osrdyne.amqp.consumer import Consumer as Consumer
from osrdyne.amqp.message import Delivery as Delivery
from osrdyne.amqp.message import Message as Message

pamqp_patches.apply()
