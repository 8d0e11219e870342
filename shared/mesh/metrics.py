"""What a mesh counts and measures."""

from __future__ import annotations

import functools
import time

from prometheus_client import CollectorRegistry, Counter, Histogram

from shared.codec import Identity
from shared.types import ServiceName

LONGEST_HOP_SECONDS = 3600.0  # more, or less than none, and the sender's host has another clock

# Seconds
HOP_BUCKETS = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 5.0),
)
LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)  # timers count in ms


class MeshMetrics:
    def __init__(self, identity: Identity) -> None:
        self.registry = CollectorRegistry()
        self.received = Counter(
            "headrace_mesh_frames_received", "Frames that reached an inbox", registry=self.registry
        )
        self.sent = Counter(
            "headrace_mesh_frames_sent", "Frames queued for a peer", registry=self.registry
        )
        self.bad = Counter(
            "headrace_mesh_bad_frames", "Frames dropped as no message", registry=self.registry
        )
        self.misdirected = Counter(
            "headrace_mesh_misdirected",
            "Messages dropped that their senders do not send here",
            registry=self.registry,
        )
        self.undelivered = Counter(
            "headrace_mesh_undelivered",
            "Messages that found no live peer, or its queue full",
            registry=self.registry,
        )
        hops = Histogram(
            "headrace_mesh_hop_seconds",
            "From a message's sending to its handling, between processes of one host",
            ["service", "peer_service"],
            buckets=HOP_BUCKETS,
            registry=self.registry,
        )
        self._hops_from = functools.cache(lambda peer: hops.labels(identity.service, peer))
        lag = Histogram(
            "headrace_event_loop_lag_seconds",
            "How late the event loop ran a timer, sampled once a second",
            ["service", "instance"],
            buckets=LAG_BUCKETS,
            registry=self.registry,
        )
        self._lag = lag.labels(identity.service, identity.name)

    @property
    def num_undelivered(self) -> float:
        return self.registry.get_sample_value("headrace_mesh_undelivered_total") or 0.0

    def hop(self, peer: ServiceName, sent: int) -> None:
        """A message arrived that was sent at this monotonic time, ns."""
        seconds = (time.monotonic_ns() - sent) / 1e9
        if 0.0 <= seconds < LONGEST_HOP_SECONDS:
            self._hops_from(peer).observe(seconds)

    def late(self, seconds: float) -> None:
        """The loop ran a timer so much later than it was due."""
        self._lag.observe(max(0.0, seconds))
