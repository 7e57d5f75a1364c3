"""What a strategy moves and holds, counted on real ranks. Runs inside ranks."""

import torch
import torch.distributed as dist

import fullshard as fs
from fullshard import on_torch
from tests.cpu import parity


def step_traffic(
    strategy: str, arguments: dict, *, kind: str = "plain", compute: str = "fp32", accumulate: int = 1, sync: str = "every"
):
    """The collectives of one steady step, and what this rank holds after it."""
    model = parity.build(kind)
    description = on_torch.describe(model)
    plan = fs.strategy(
        strategy,
        description,
        **arguments,
        precision=fs.Precision(compute=compute),
        batch=fs.Batch(1, parity.LENGTH, accumulate, sync),
    )
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3), seed=7, first_step_checks=parity.checked(model))
    draw = torch.Generator().manual_seed(on_torch.data_rank(plan.mesh))
    for _ in range(2):  # the first step also runs the checks, which talk
        ids = torch.randint(0, parity.VOCAB, (accumulate, 1, parity.LENGTH + 1), generator=draw)
        batches = [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in ids]
        with on_torch.record() as traffic:
            on_torch.train_step(state, batches)
    return [(c.kind, c.nbytes, c.ranks) for c in traffic.collectives], state.held_bytes()


def prefetch_order(depth: int) -> tuple[list[str], list[str]]:
    """Gathers and block computations, as they are issued: of one forward, and of its backward."""
    model = parity.build("plain")
    plan = fs.zero3(
        on_torch.describe(model),
        devices=dist.get_world_size(),
        batch=fs.Batch(1, parity.LENGTH),
        prefetch=fs.Prefetch(depth, depth),
    )
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3))
    draw = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, parity.VOCAB, (1, parity.LENGTH + 1), generator=draw)
    on_torch.train_step(state, [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}])
    events: list[str] = []
    for i, layer in enumerate(state.model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, i=i: events.append(f"forward {i}"))
        layer.mlp.register_full_backward_pre_hook(lambda *_, i=i: events.append(f"backward {i}"))
    with on_torch.record() as traffic:
        traffic.collectives = _Spy(events)
        loss = state.model(ids).sum()
        forward = list(events)
        events.clear()
        loss.backward()
    return forward, events


class _Spy(list):
    """In place of the record's list: notes each collective among the other events."""

    def __init__(self, events: list[str]):
        super().__init__()
        self.events = events

    def append(self, item) -> None:
        self.events.append(item.kind)
