"""What the dashboards show: each panel a question, its queries, and where trouble begins.

`tools/dashboards.py` makes Grafana's JSON of it, `tools/plot_dashboards.py` a picture for the docs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["lines", "stacked", "number", "bars"]
RATE = "$__rate_interval"
HERE = 'namespace=~"$namespace"'


@dataclass(frozen=True, kw_only=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """`limit`: drawn as a line; beyond it there is trouble. `floor`: below it there is."""

    question: str
    queries: list[Query] = field(default_factory=list)
    unit: str = "short"
    kind: Kind = "lines"
    limit: float | None = None
    floor: float | None = None
    width: int = 8  # of 24
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Board:
    name: str
    title: str
    description: str
    panels: list[Panel]


def rate(metric: str, by: str = "", where: str = "") -> str:
    labels = f"{HERE},{where}" if where else HERE
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{labels}}}[{RATE}]))"


def quantile(q: float, metric: str, by: str = "", where: str = "") -> str:
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', f'le,{by}'.strip(','), where)})"


def mean(metric: str, by: str = "", where: str = "") -> str:
    return f"{rate(f'{metric}_sum', by, where)} / {rate(f'{metric}_count', by, where)}"


def quantiles(metric: str, label: str = "", by: str = "") -> list[Query]:
    """The median and the 95th percentile; `label` before their legends."""
    suffix = f" {{{{{by}}}}}" if by else ""
    prefix = f"{label} " if label else ""
    return [
        Query(expr=quantile(q, metric, by), legend=f"{prefix}p{round(q * 100)}{suffix}")
        for q in (0.5, 0.95)
    ]


R, V, D = "canopy_router", "canopy_verify", "canopy_draft"
DRAFTS = rate(f"{R}_spec_decode_num_drafts_total")
ROOT_ONLY = rate(f"{R}_root_only_rounds_total")
PER_POS = f"{R}_spec_decode_num_accepted_tokens_per_pos_total"
TOKENS = rate(f"{R}_spec_accept_length_sum")
TROUBLE = 'reason=~"UNAVAILABLE|INTERNAL"'
FAILED = rate(f"{R}_rejected_requests_total", where=TROUBLE)
ACCEPTANCE = Query(expr=mean(f"{R}_spec_accept_length"), legend="tokens per round")


def gauge(metric: str, by: str, where: str = "") -> str:
    labels = f"{HERE},{where}" if where else HERE
    return f"sum by ({by}) ({metric}{{{labels}}})"


OVERVIEW = Board(
    name="overview",
    title="Canopy: overview",
    description="Do clients get what they ask for, and how fast?",
    panels=[
        Panel(
            question="What share fails?",
            queries=[Query(expr=f"{FAILED} / ({rate(f'{R}_requests_total')} + {FAILED})")],
            unit="percentunit",
            kind="number",
            limit=0.05,
            width=4,
        ),
        Panel(
            question="Tokens a second?",
            queries=[Query(expr=TOKENS)],
            kind="number",
            width=4,
        ),
        Panel(
            question="Tokens a round?",
            queries=[ACCEPTANCE],
            kind="number",
            floor=1.2,
            width=4,
        ),
        Panel(
            question="Are all services there?",
            queries=[
                Query(
                    expr=f'min by (__name__) ({{__name__=~"canopy_(router|verify|draft)_serving",'
                    f"{HERE}}})",
                    legend="{{__name__}}",
                ),
                Query(expr=f"sum by (role) ({R}_peer_ready{{{HERE}}})", legend="linked: {{role}}"),
            ],
            kind="number",
            floor=1,
            width=8,
        ),
        Panel(
            question="What runs here?",
            queries=[
                Query(
                    expr=f"count by (service, version) (canopy_build_info{{{HERE}}})",
                    legend="{{service}} {{version}}",
                )
            ],
            kind="number",
            width=4,
        ),
        Panel(
            question="How long until the first token?",
            queries=quantiles(f"{R}_time_to_first_token_seconds"),
            unit="s",
            limit=10,
            width=8,
        ),
        Panel(
            question="How fast do tokens come then?",
            queries=[
                *quantiles(f"{R}_time_per_output_token_seconds", "per token"),
                *quantiles(f"{R}_inter_token_seconds", "between bursts"),
            ],
            unit="s",
            note="Tokens come in bursts of a round: the gap between bursts is what a reader sees,"
            " the time per token what it amounts to.",
            width=8,
        ),
        Panel(
            question="How long does a whole request take?",
            queries=quantiles(f"{R}_request_seconds"),
            unit="s",
            width=8,
        ),
        Panel(
            question="How do requests end?",
            queries=[
                Query(expr=rate(f"{R}_requests_total", "outcome"), legend="{{outcome}}"),
            ],
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            question="What is refused, and why?",
            queries=[
                Query(expr=rate(f"{R}_rejected_requests_total", "reason"), legend="{{reason}}"),
                Query(
                    expr=rate(f"{R}_tenant_refusals_total", "limit"),
                    legend="of these by a caller's own limit: {{limit}}",
                ),
            ],
            unit="reqps",
        ),
        Panel(
            question="Is there a queue?",
            queries=[
                Query(expr=f"sum ({R}_running_requests{{{HERE}}})", legend="running"),
                Query(expr=f"sum ({R}_waiting_requests{{{HERE}}})", legend="without a token yet"),
                Query(
                    expr=f'sum ({V}_sequences{{{HERE},state="waiting"}})',
                    legend="waiting in verify",
                ),
            ],
        ),
    ],
)

SPECULATION = Board(
    name="speculation",
    title="Canopy: speculation",
    description="Are the trees right, and are they worth their time?",
    panels=[
        Panel(
            question="How many tokens does a round bring?",
            queries=[
                ACCEPTANCE,
                Query(
                    expr=f"1 + {rate(f'{R}_spec_decode_num_accepted_tokens_total')} / {DRAFTS}",
                    legend="of rounds with a tree",
                ),
            ],
            floor=1.2,
        ),
        Panel(
            question="How deep are the trees right?",
            queries=[
                Query(
                    expr=f"{rate(PER_POS, 'position')} / on() group_left() {DRAFTS}",
                    legend="depth {{position}}",
                )
            ],
            unit="percentunit",
            kind="bars",
            note="Share of rounds with a tree whose path was right at least down to this depth.",
        ),
        Panel(
            question="How many tokens do single rounds bring?",
            queries=[
                Query(
                    expr=f"{rate(f'{R}_spec_accept_length_bucket', 'le')}"
                    f" / on() group_left() {rate(f'{R}_spec_accept_length_count')}",
                    legend="at most {{le}}",
                )
            ],
            unit="percentunit",
            kind="bars",
        ),
        Panel(
            question="What share of drafted nodes is right?",
            queries=[
                Query(
                    expr=f"{rate(f'{R}_spec_decode_num_accepted_tokens_total')}"
                    f" / {rate(f'{R}_spec_decode_num_draft_tokens_total')}",
                    legend="accepted",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            question="How large are the trees?",
            queries=[
                Query(expr=mean(f"{D}_tree_nodes"), legend="grown"),
                Query(
                    expr=f"{rate(f'{V}_offered_tree_nodes_total')}"
                    f" / {rate(f'{V}_tree_nodes_count')}",
                    legend="offered to verify",
                ),
                Query(expr=mean(f"{V}_tree_nodes"), legend="verified per round"),
            ],
            note="Root included. Verified below offered: the rest had no room, or did not pay"
            " (verify's --tree-budget auto).",
        ),
        Panel(
            question="How many rounds go without a tree?",
            queries=[
                Query(expr=f"{ROOT_ONLY} / ({ROOT_ONLY} + {DRAFTS})", legend="root only"),
                Query(
                    expr=f"{rate(f'{R}_draft_misses_total')} / ({ROOT_ONLY} + {DRAFTS})",
                    legend="tree came too late",
                ),
            ],
            unit="percentunit",
            limit=0.2,
        ),
        Panel(
            question="Do trees ahead reach the rounds they are for?",
            queries=[
                Query(expr=rate(f"{V}_ahead_rounds_total", "outcome"), legend="{{outcome}}"),
            ],
            kind="stacked",
            note="Rounds per second while trees are grown ahead (the draft's --draft-ahead): none"
            " waits; tree: it had nodes of one, root: nothing of a tree was there.",
        ),
        Panel(
            question="How are rounds drafted?",
            queries=[
                Query(expr=f"avg by (way) ({V}_drafting{{{HERE}}})", legend="{{way}}"),
            ],
            unit="percentunit",
            kind="stacked",
            note="Shares of verify's replicas. Each measures the ways and takes the best"
            " (--drafting auto); probes of another: canopy_verify_draft_probes_total. Rounds of"
            " roots alone by its advice: canopy_router_undrafted_rounds_total.",
        ),
        Panel(
            question="Where does a round's time go?",
            queries=[
                Query(expr=rate(f"{R}_round_seconds_sum", "where"), legend="{{where}}"),
            ],
            kind="stacked",
            note="Seconds per second, over all sequences.",
        ),
        Panel(
            question="How much of the draft's time is not hidden?",
            queries=[
                Query(
                    expr=rate(f"{R}_round_seconds_sum", where='where="draft"')
                    + f" / {rate(f'{R}_round_seconds_sum')}",
                    legend="share of a round spent waiting for its tree",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            question="Are sequences cut back or opened anew?",
            queries=[
                Query(expr=rate(f"{R}_rollbacks_total", "reason"), legend="rollback: {{reason}}"),
                Query(expr=rate(f"{R}_fail_overs_total"), legend="opened anew"),
            ],
            unit="ops",
        ),
    ],
)

ENGINES = Board(
    name="engines",
    title="Canopy: engines",
    description="Are the devices busy with the right things?",
    panels=[
        Panel(
            question="How long does a verify step take?",
            queries=[
                *quantiles(f"{V}_step_seconds"),
                Query(expr=quantile(0.95, f"{V}_host_seconds"), legend="host work p95"),
            ],
            unit="s",
        ),
        Panel(
            question="How long does a draft step take?",
            queries=[
                *quantiles(f"{D}_step_seconds", by="kind"),
                Query(expr=quantile(0.95, f"{D}_host_seconds"), legend="host work p95"),
            ],
            unit="s",
        ),
        Panel(
            question="How long do rounds wait for their step?",
            queries=[
                *quantiles(f"{V}_queue_seconds", "verify"),
                Query(expr=quantile(0.95, f"{V}_gather_seconds"), legend="verify gathers p95"),
                *quantiles(f"{D}_queue_seconds", "draft"),
            ],
            unit="s",
        ),
        Panel(
            question="How full are the steps?",
            queries=[
                Query(expr=mean(f"{V}_step_sequences"), legend="verify: sequences"),
                Query(expr=mean(f"{D}_step_sequences"), legend="draft: sequences"),
                Query(expr=mean(f"{V}_step_tokens"), legend="verify: rows"),
            ],
        ),
        Panel(
            question="How busy are the devices?",
            queries=[
                Query(
                    expr=f"sum by (instance) (rate({V}_step_seconds_sum{{{HERE}}}[{RATE}]))",
                    legend="verify {{instance}}",
                ),
                Query(
                    expr=f"sum by (instance) (rate({D}_step_seconds_sum{{{HERE}}}[{RATE}]))",
                    legend="draft {{instance}}",
                ),
            ],
            unit="percentunit",
        ),
        Panel(
            question="What do sequences do?",
            queries=[
                Query(expr=gauge(f"{V}_sequences", "state"), legend="verify: {{state}}"),
                Query(expr=gauge(f"{D}_sequences", "state"), legend="draft: {{state}}"),
            ],
        ),
        Panel(
            question="Is there room in verify's KV cache?",
            queries=[Query(expr=gauge(f"{V}_kv_pages", "state"), legend="{{state}}")],
            kind="stacked",
            note="Live and reserved pages are held; cached ones can be had back.",
        ),
        Panel(
            question="What share of pages is held?",
            queries=[
                Query(
                    expr=f"{gauge(f'{V}_kv_pages', 'instance', STATE)}"
                    f" / {gauge(f'{V}_kv_pages', 'instance')}",
                    legend="verify {{instance}}",
                )
                for STATE in ('state=~"live|reserved"',)
            ]
            + [
                Query(
                    expr=f"{gauge(f'{D}_kv_pages', 'instance', STATE)}"
                    f" / {gauge(f'{D}_kv_pages', 'instance')}",
                    legend="draft {{instance}}",
                )
                for STATE in ('state=~"live|reserved"',)
            ],
            unit="percentunit",
            limit=0.9,
        ),
        Panel(
            question="What share of tokens is found computed?",
            queries=[
                Query(
                    expr=f"{rate(f'{service}_prefix_cache_hit_tokens_total')}"
                    f" / {rate(f'{service}_prefix_cache_query_tokens_total')}",
                    legend=name,
                )
                for service, name in ((V, "verify"), (D, "draft"))
            ],
            unit="percentunit",
            note="Of prompts, and of what is computed again after a preemption.",
        ),
        Panel(
            question="Is anything put out for want of memory?",
            queries=[
                Query(expr=rate(f"{V}_preemptions_total"), legend="verify"),
                Query(expr=rate(f"{D}_evictions_total"), legend="draft"),
            ],
            unit="ops",
        ),
        Panel(
            question="Does anything compile or fail?",
            queries=[
                Query(
                    expr=f"sum by (instance) ({{__name__=~"
                    f'"canopy_(verify|draft)_compiles_after_warm_up_total",{HERE}}})',
                    legend="compiled after warm-up: {{instance}}",
                ),
                Query(
                    expr="sum by (instance) ({__name__=~"
                    f'"canopy_(verify|draft)_failed_steps_total",{HERE}}})',
                    legend="failed steps: {{instance}}",
                ),
            ],
            limit=1,
        ),
        Panel(
            question="Which commands go wrong?",
            queries=[
                Query(expr=rate(f"{V}_sequence_errors_total", "code"), legend="verify: {{code}}"),
                Query(expr=rate(f"{D}_sequence_errors_total", "code"), legend="draft: {{code}}"),
            ],
            unit="ops",
        ),
        Panel(
            question="How much memory does the host give?",
            queries=[
                Query(
                    expr=f"process_resident_memory_bytes{{{HERE}}}"
                    f" * on(namespace, instance) group_left(service) canopy_build_info{{{HERE}}}",
                    legend="{{service}} {{instance}}",
                )
            ],
            unit="bytes",
        ),
    ],
)

TRANSPORT = Board(
    name="transport",
    title="Canopy: transport",
    description="What do the wires cost?",
    panels=[
        Panel(
            question="How long is a round on the way?",
            queries=[
                Query(
                    expr=quantile(q, f"{R}_round_seconds", where='where="transport"'),
                    legend=f"p{round(q * 100)}",
                )
                for q in (0.5, 0.95)
            ],
            unit="s",
        ),
        Panel(
            question="How long does the router take to answer a frame?",
            queries=quantiles(f"{R}_turnaround_seconds", by="role"),
            unit="s",
            limit=0.003,
        ),
        Panel(
            question="What does a token cost in bytes?",
            queries=[
                Query(expr=f"{rate(f'{R}_wire_bytes_total')} / {TOKENS}", legend="frames"),
                Query(expr=f"{rate(f'{R}_feature_bytes_total')} / {TOKENS}", legend="features"),
            ],
            unit="bytes",
        ),
        Panel(
            question="How much goes through the command streams?",
            queries=[
                Query(
                    expr=rate(f"{R}_wire_bytes_total", "role, direction"),
                    legend="{{role}} {{direction}}",
                )
            ],
            unit="Bps",
        ),
        Panel(
            question="How many frames?",
            queries=[
                Query(
                    expr=rate(f"{R}_wire_frames_total", "role, direction"),
                    legend="{{role}} {{direction}}",
                )
            ],
            unit="ops",
        ),
        Panel(
            question="How many bytes of features?",
            queries=[
                Query(expr=rate(f"{R}_feature_bytes_total", "role"), legend="router: {{role}}"),
                Query(expr=rate(f"{D}_feature_bytes_total"), legend="arrived at the draft"),
            ],
            unit="Bps",
        ),
        Panel(
            question="Do features wait at the draft?",
            queries=[Query(expr=f"sum ({D}_waiting_feature_bytes{{{HERE}}})", legend="waiting")],
            unit="bytes",
        ),
        Panel(
            question="Are features sent in vain?",
            queries=[
                Query(expr=rate(f"{D}_ignored_feature_rows_total"), legend="rows known already"),
                Query(expr=rate(f"{D}_bad_feature_blocks_total"), legend="blocks not readable"),
            ],
            unit="ops",
        ),
        Panel(
            question="Do links break?",
            queries=[
                Query(
                    expr=gauge(f"{R}_peer_losses_total", "role, peer"),
                    legend="losses: {{role}} {{peer}}",
                ),
                Query(
                    expr=f"min by (role, peer) ({R}_peer_ready{{{HERE}}})",
                    legend="ready: {{role}} {{peer}}",
                ),
            ],
        ),
    ],
)

BOARDS = [OVERVIEW, SPECULATION, ENGINES, TRANSPORT]
