"""Data for the figures of incident 7's notebook: the miniature's blocks, and what readers find in them."""

from __future__ import annotations

from staleproof.incidents.published_unwritten.scene import ZEROS, Memory, Miniature, tenants

NOW, EARLIER, NEVER, NOBODY = "this step", "an earlier step", "never written", "nobody"
# Both send the victim's prompt.
READERS = ("victim", "stranger")


def pool(engine: Miniature) -> list[list[str]]:
    """Who wrote the keys and values that each block's hash stands for: a row a block, a column a step.

    ``never written`` is a block in the prefix cache whose keys and values were planned and not written.
    """
    cells = [[NOBODY] * engine.memory.steps for _ in range(engine.blocks)]
    for block, row in enumerate(cells):
        events = [event for event in engine.events if event.block == block]
        state = NOBODY
        for step in range(1, engine.memory.steps + 1):
            what = [event.what for event in events if event.step == step]
            if "write" in what:
                state = NOW
            elif "withdraw" in what:
                state = NEVER
            elif state == NOW:
                state = EARLIER
            row[step - 1] = state
    return cells


def found(memory: Memory) -> list[list[str]]:
    """What each of :data:`READERS` finds at each position of the victim's prompt.

    ``written``: the right keys and values of the prompt, whoever computed them. ``never written``: those of
    another request. ``zero``: cleared and not written since.

    >>> [row.count("never written") for row in found(Miniature().run().memory)]
    [4, 4]
    """
    wrong = {(r.reader, r.position): "zero" if r.whose == ZEROS else NEVER for r in memory.reads}
    (prompt,) = (arrival.prompt for arrival in tenants() if arrival.name == "victim")
    return [[wrong.get((reader, at), "written") for at in range(len(prompt))] for reader in READERS]
