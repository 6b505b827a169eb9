"""The channels of a leader that commands on queues use: which kind of command goes where, and why.

Source: lifecycle: token-channel-never-fails, token-channel-fences; decision 0039.
"""

from __future__ import annotations

from dataclasses import dataclass

from osrdyne.broker.leadership.channel_pool import ChannelPool
from osrdyne.broker.leadership.token import TokenChannel
from osrdyne.broker.publishing.publisher import LeaderPublisher


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderChannels:
    """`token`: bind, unbind and delete, which a deposed leader must not do. `spare`: questions that may fail, such as
    passive declarations. `probing`: probes, which a silent queue holds up. `declaring`: declarations of unbound queues.
    `publisher`: everything that is published with a confirm."""

    token: TokenChannel
    spare: ChannelPool
    probing: ChannelPool
    declaring: ChannelPool
    publisher: LeaderPublisher
