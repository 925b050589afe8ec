"""What the router counts, at the end of each round's and each generation's turn."""

from __future__ import annotations

from common.metrics import Metrics, integer_buckets
from router.actions import Finish

MAX_DEPTH_LABEL = 32


class RouterMetrics:
    """All names begin with `canopy_router_`."""

    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counter(
            "requests", "Generations ended, by how: stop, length, aborted, failed", ["outcome"]
        )
        self.rejected = metrics.counter(
            "rejected_requests", "Requests refused before they ran, by reason", ["reason"]
        )
        self.running = metrics.gauge("running_requests", "Generations in progress")
        self.prompt_tokens = metrics.counter("prompt_tokens", "Prompt tokens of ended generations")
        self.completion_tokens = metrics.counter(
            "completion_tokens", "Tokens returned by ended generations"
        )
        self.spec_num_drafts = metrics.counter(
            "spec_decode_num_drafts", "Rounds of ended generations after their first"
        )
        self.spec_num_draft_tokens = metrics.counter(
            "spec_decode_num_draft_tokens", "Tree nodes verified, roots not counted"
        )
        self.spec_num_accepted_tokens = metrics.counter(
            "spec_decode_num_accepted_tokens", "Tree nodes accepted"
        )
        self.spec_num_accepted_per_pos = metrics.counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted nodes by depth", ["position"]
        )
        self.root_only_rounds = metrics.counter(
            "root_only_rounds", "Rounds without a tree although speculation was on"
        )
        self.rollbacks = metrics.counter("rollbacks", "Sequences opened again after a loss")
        self.num_emitted = metrics.histogram(
            "spec_accept_length", "Tokens emitted by a round", integer_buckets(33)
        )
        self.time_to_first_token = metrics.histogram(
            "time_to_first_token_seconds", "From request to first token"
        )
        self.time_per_output_token = metrics.histogram(
            "time_per_output_token_seconds", "Decode time over tokens, per generation"
        )
        self.end_to_end = metrics.histogram("request_seconds", "From request to completion")
        self.draft_seconds = metrics.counter("draft_seconds", "Time that rounds spent in draft")
        self.verify_seconds = metrics.counter("verify_seconds", "Time that rounds spent in verify")
        self.transport_seconds = metrics.counter(
            "transport_seconds", "Time that rounds spent on the way to draft and verify and back"
        )
        self.peers_ready = metrics.gauge("peer_ready", "1 while a peer is connected", ["role"])
        self.peer_losses = metrics.counter("peer_losses", "Links to peers that broke", ["role"])
        self.feature_bytes = metrics.counter("feature_bytes", "Feature bytes passed to the draft")
        self.wire_bytes = metrics.counter(
            "wire_bytes", "Bytes of command frames, by peer and direction", ["role", "direction"]
        )

    def count_finish(self, finish: Finish, now: float) -> None:
        stats = finish.stats
        self.requests.labels(finish.reason).inc()
        self.prompt_tokens.inc(stats.num_prompt_tokens)
        self.completion_tokens.inc(stats.num_completion_tokens)
        self.spec_num_drafts.inc(max(0, stats.num_rounds - 1))
        self.spec_num_draft_tokens.inc(stats.num_drafted)
        self.spec_num_accepted_tokens.inc(stats.num_accepted)
        for depth, count in stats.accepted_per_depth.items():
            self.spec_num_accepted_per_pos.labels(min(depth, MAX_DEPTH_LABEL)).inc(count)
        for num_emitted, count in stats.emitted_histogram.items():
            for _ in range(count):
                self.num_emitted.observe(num_emitted)
        self.root_only_rounds.inc(stats.num_root_only_rounds)
        self.rollbacks.inc(stats.num_rollbacks)
        if stats.first_token_at is not None:
            self.time_to_first_token.observe(stats.time_to_first_token_seconds)
        if stats.num_completion_tokens > 1:
            self.time_per_output_token.observe(
                stats.decode_seconds / (stats.num_completion_tokens - 1)
            )
        self.end_to_end.observe(now - stats.started)
        self.draft_seconds.inc(stats.draft_seconds)
        self.verify_seconds.inc(stats.verify_seconds)
        self.transport_seconds.inc(stats.transport_seconds)
