"""`canopy demo`: a real model, three real processes, one question, speculation on and off."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from canopy import library
from canopy.client import Client
from canopy.generating import show_stream
from canopy.results import Completion, FinishReason, Message, Options
from canopy.stack import Stack, StackSettings

QUESTION = "Why is the sky blue? Explain it to a child in a few sentences."
MAX_TOKENS = 96
NUM_REPEATS = 2
"""Timed runs of each kind, in turn, so that both meet the same machine."""


@dataclass
class _Tally:
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0

    def add(self, completion: Completion) -> None:
        """The first token and its round belong to the prefill, and are left out."""
        self.tokens += completion.num_completion_tokens - 1
        self.rounds += completion.speculation.num_rounds - 1
        self.seconds += completion.timings.decode

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0


def run_demo(console: Console) -> int:
    """Returns 0, nothing left running. Raises StartupError or CanopyError."""
    console.print("[bold]1. The model[/]: SmolLM2-135M-Instruct, float32, and a draft head")
    model = library.fetch_model(library.DEMO_MODEL)
    head = library.demo_head(model)
    console.print(f"   {model}\n   {head}")
    console.print("[bold]2. Three services[/], each a process of its own (compiling takes a while)")
    # A tree in every round, to be seen and timed; by default only where trees pay.
    # Up to 8 rows cost a CPU about what one does: a tree of 8 nodes, in every round.
    flags = {"verify": ("--tree-budget", "full"), "draft": ("--max-nodes", "8", "--max-depth", "4")}
    with Stack(StackSettings(model=model, head=head, flags=flags, show_logs=False)) as stack:
        for name, child in stack.children.items():
            console.print(f"   {name}: {child.address}, process {child.process.pid}")
        with Client(stack.address) as client:
            console.print(f"[bold]3. A question[/]: {QUESTION}\n")
            same = _ask(client, console)
    if not same:
        console.print("[bold]The two texts differ[/]: near ties may; see docs/architecture.md")
    return 0


def _ask(client: Client, console: Console) -> bool:
    """Streams the answer, then times both kinds in turn; whether their tokens are equal."""
    prompt = [Message("user", QUESTION)]
    options = {
        True: Options(max_tokens=MAX_TOKENS, speculation=True, token_ids=True),
        False: Options(max_tokens=MAX_TOKENS, speculation=False, token_ids=True),
    }
    shown = show_stream(client.stream(prompt, options[True]), console)
    if shown.finish_reason is FinishReason.LENGTH:
        console.print(f"[dim](cut at {MAX_TOKENS} tokens)[/]")
    tallies = {True: _Tally(), False: _Tally()}
    texts = set()
    for _ in range(NUM_REPEATS):
        for kind, tally in tallies.items():
            answer = client.generate(prompt, options[kind])
            tally.add(answer.completion)
            texts.add(answer.token_ids)
    console.print()
    console.print(_table(tallies[True], tallies[False]))
    return len(texts) == 1


def _table(speculative: _Tally, root_only: _Tally) -> Table:
    table = Table("", "with speculation", "without", box=None, padding=(0, 2, 0, 0))
    pair = (speculative, root_only)
    table.add_row(
        f"tokens after the first, {NUM_REPEATS} runs", *(str(tally.tokens) for tally in pair)
    )
    table.add_row("rounds", *(str(tally.rounds) for tally in pair))
    table.add_row("acceptance length", *(f"{tally.acceptance_length:.2f}" for tally in pair))
    table.add_row("tokens/s", *(f"{tally.tokens_per_second:.1f}" for tally in pair))
    if root_only.tokens_per_second:
        ratio = speculative.tokens_per_second / root_only.tokens_per_second
        table.add_row("ratio", f"{ratio:.2f}", "1")
        if ratio < 1:
            table.caption = "Trees do not pay on this machine: `canopy serve` would leave them out."
    return table
