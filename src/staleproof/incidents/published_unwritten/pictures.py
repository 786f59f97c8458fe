"""What the notebook of incident 7 draws: every block of the miniature's pool, step by step."""

from __future__ import annotations

from staleproof.incidents.published_unwritten.scene import Miniature

NOW, EARLIER, NEVER, NOBODY = "this step", "an earlier step", "never written", "nobody"


def pool(engine: Miniature) -> list[list[str]]:
    """Who wrote what each block's hash promises: a row a block, a column a step.

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
