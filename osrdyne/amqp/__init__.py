"""Plain AMQP: connections, channels, consumers and a confirmed publisher, shared by controller, client and worker.

Built on aio-pika's plain connections and channels, and for messages on the aiormq channel below them (decision 0042).
Nothing reconnects or is declared again automatically: the owner of a connection decides what follows its loss.
Importing the package applies the patches of `pamqp_patches`.
"""

from __future__ import annotations

import logging

from osrdyne.amqp import pamqp_patches as pamqp_patches
from osrdyne.amqp.channel import Channel as Channel
from osrdyne.amqp.channel import QueueInfo as QueueInfo
from osrdyne.amqp.connection import ALARM as ALARM
from osrdyne.amqp.connection import LOG_LEVELS as LOG_LEVELS
from osrdyne.amqp.connection import Connection as Connection
from osrdyne.amqp.connection import ConnectionOptions as ConnectionOptions
from osrdyne.amqp.connection import connect as connect
from osrdyne.amqp.consumer import Consumer as Consumer
from osrdyne.amqp.message import Delivery as Delivery
from osrdyne.amqp.message import Message as Message

pamqp_patches.apply()

for _name in LOG_LEVELS:
    # In a program without a configuration of `logging`, Python prints errors of loggers that have no handler.
    logging.getLogger(_name).addHandler(logging.NullHandler())
