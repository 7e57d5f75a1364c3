"""Runs on ranks for `test_copies`: what a reader, a writer and the next step find, whatever happened before them."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor

import fullshard as fs
from fullshard import on_torch
from tests.cpu import homes
from tests.cpu.homes import Case

NAME = "model.layers.1.mlp.up_proj.weight"


def step(state: on_torch.State, index: int, **options: Any) -> None:
    on_torch.train_step(state, homes.batches(state, index), clip=1.0, **options)


def plain(case: Case, disk: str, steps: int) -> dict[str, torch.Tensor]:
    """The values after steps that nothing disturbs."""
    state = homes.make(case, disk)
    for i in range(steps):
        step(state, i)
    return homes.values(state)


# -- saved, read and written while something is gathered ------------------------------------------------------------


def forward(state: on_torch.State) -> None:
    state.model(homes.batches(state, 7)[0]["input_ids"])


def forward_without_gradients(state: on_torch.State) -> None:
    with torch.no_grad():
        forward(state)


def forward_that_fails(state: on_torch.State) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = state.model.get_submodule("model.layers.1").register_forward_hook(fail)
    try:
        forward(state)
    except KeyboardInterrupt:
        hook.remove()


def backward_that_fails(state: on_torch.State) -> None:
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise torch.OutOfMemoryError("no room")

    block = state.model.get_submodule("model.layers.0")
    hook = block.register_forward_hook(lambda module, args, output: Fail.apply(output))
    try:
        on_torch.summed_loss(state.model, homes.batches(state, 7)[0]).backward()
    except torch.OutOfMemoryError:
        hook.remove()


BEFORE: dict[str, Callable[[on_torch.State], None]] = {
    f.__name__: f for f in (forward, forward_without_gradients, forward_that_fails, backward_that_fails)
}


def looked_at(case: Case) -> dict[str, Any]:
    """For each thing that may come before: how far what is read, saved and loaded is from the values, and what a write loses."""
    found = {}
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory() as shared:
        directory = [shared]
        torch.distributed.broadcast_object_list(directory)
        expected = plain(case, disk, 2)
        for name, before in BEFORE.items():
            state = homes.make(case, disk)
            step(state, 0)
            step(state, 1)
            before(state)
            with state.values() as values:
                shards = all(isinstance(v, DTensor) for v in values.values())
            fs.checkpoint.save(f"{directory[0]}/{name}", state)
            other = homes.make(case, disk)
            fs.checkpoint.load(f"{directory[0]}/{name}", other)
            read = homes.apart(homes.values(other), expected)
            before(state)
            with torch.no_grad(), state.values(changed=True) as values:
                values[NAME].mul_(0.5)
            state.optimizer.zero_grad()
            with torch.no_grad():
                forward(state)
            written = homes.values(state)
            expected_written = expected | {NAME: expected[NAME] * 0.5}
            before(state)
            fs.checkpoint.load(f"{directory[0]}/{name}", state)
            found[name] = {
                "shards": shards,
                "read": read,
                "written": homes.apart(written, expected_written),
                "loaded": homes.apart(homes.values(state), expected),
            }
            torch.distributed.barrier()
    return found


# -- steps that fail ---------------------------------------------------------------------------------------------------


def failing(place: str, micro: int) -> Callable[[nn.Module, Any], Any]:
    """A loss that fails in a micro-batch: before or after forward, or after a backward of the caller's."""
    seen = [0]

    def loss(model: nn.Module, batch: Any) -> Any:
        seen[0] += 1
        if seen[0] <= micro:
            return on_torch.summed_loss(model, batch)
        found = None if place == "data" else on_torch.summed_loss(model, batch)
        if place == "backward":
            assert found is not None
            found.backward()
        raise torch.OutOfMemoryError("no room")

    return loss


def failed_steps(case: Case) -> dict[str, float]:
    """How far a run with failed steps is from one without, by where they failed."""
    found = {}
    with tempfile.TemporaryDirectory() as disk:
        expected = plain(case, disk, 3)
        for place, micro in (("data", 0), ("forward", 1), ("backward", 1), ("module", 0), ("gradient", 0)):
            state = homes.make(case, disk)
            for i in range(3):
                random = torch.get_rng_state()
                if i == 0 and place in ("backward", "gradient"):  # the first step's checks call the loss without gradients
                    step(state, i)
                    continue
                try:
                    fail = forward_in_step(state, place) if place in ("module", "gradient") else failing(place, micro)
                    step(state, i, loss=fail)
                except (torch.OutOfMemoryError, KeyboardInterrupt):
                    assert torch.equal(random, torch.get_rng_state())
                    assert all(p.grad is None for p in state.model.parameters())
                step(state, i)
            found[place] = homes.apart(homes.values(state), expected)
    return found


def forward_in_step(state: on_torch.State, place: str) -> Callable[[nn.Module, Any], Any]:
    """A loss whose forward or backward fails inside of the model."""

    def loss(model: nn.Module, batch: Any) -> Any:
        torch.rand(3)
        (forward_that_fails if place == "module" else backward_that_fails)(state)
        raise torch.OutOfMemoryError("no room")

    return loss


def own_failures(case: Case, last: bool) -> float:
    """A loop of the caller's whose second micro-batch fails, and which calls `zero_grad`. `last`: gradients wait for the last
    micro-batch."""
    with tempfile.TemporaryDirectory() as disk:
        runs = []
        for fails in (True, False):
            state = homes.make(case, disk)
            for i in range(3):
                first, second = homes.batches(state, i)
                for attempt in range(1 + fails):
                    if last:
                        state.model.set_requires_gradient_sync(False)
                    (on_torch.summed_loss(state.model, first) / 64).backward()
                    if fails and not attempt:
                        (forward_that_fails if i % 2 else backward_that_fails)(state)
                        state.optimizer.zero_grad()
                        continue
                    state.model.set_requires_gradient_sync(True)
                    (on_torch.summed_loss(state.model, second) / 64).backward()
                state.optimizer.step()
                state.optimizer.zero_grad()
            runs.append(homes.values(state))
        return homes.apart(*runs)


def left_gradients(case: Case) -> str:
    with tempfile.TemporaryDirectory() as disk:
        state = homes.make(case, disk)
        on_torch.summed_loss(state.model, homes.batches(state, 0)[0]).backward()
        return said(lambda: step(state, 0))


def torn(case: Case) -> list[str]:
    """Without clipping, units are updated during backward: what a failure there says, and what follows."""
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory() as shared:
        directory = [shared]
        torch.distributed.broadcast_object_list(directory)
        state = homes.make(case, disk)
        on_torch.train_step(state, homes.batches(state, 0))
        fs.checkpoint.save(directory[0], state)
        notes = []

        def loss(model: nn.Module, batch: Any) -> Any:
            embedding = state.model.get_submodule("model.embed_tokens")
            hook = embedding.register_forward_hook(lambda m, a, out: out.register_hook(_no_room) and None)
            found = on_torch.summed_loss(model, batch)
            hook.remove()
            return found

        try:
            on_torch.train_step(state, homes.batches(state, 1), loss=loss)
        except torch.OutOfMemoryError as error:
            notes = list(getattr(error, "__notes__", []))
        after = [
            said(lambda: forward(state)),
            said(lambda: on_torch.train_step(state, homes.batches(state, 1))),
            said(lambda: fs.checkpoint.save(disk, state)),
        ]
        fs.checkpoint.load(directory[0], state)
        on_torch.train_step(state, homes.batches(state, 1))
        other = homes.make(case, disk)
        for i in range(2):
            on_torch.train_step(other, homes.batches(other, i))
        torch.distributed.barrier()
        return [*notes, *after, f"{homes.apart(homes.values(state), homes.values(other)):.0e}"]


def _no_room(_: Any) -> None:
    raise torch.OutOfMemoryError("no room")


def bad_gradients(case: Case) -> list[str]:
    """Without clipping, units are updated before it is known that a gradient is not finite: what follows says so until a load."""
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory() as shared:
        directory = [shared]
        torch.distributed.broadcast_object_list(directory)
        state = homes.make(case, disk)
        on_torch.train_step(state, homes.batches(state, 0))
        fs.checkpoint.save(directory[0], state)
        head = state.model.get_submodule("lm_head")
        hook = head.register_forward_hook(lambda m, a, out: out.register_hook(lambda g: g * float("inf")) and None)
        on_torch.train_step(state, homes.batches(state, 1))
        hook.remove()
        after = [said(lambda: forward_without_gradients(state)), said(lambda: forward(state)), said(lambda: step(state, 1))]
        fs.checkpoint.load(directory[0], state)
        with torch.no_grad():
            finite = state.model(homes.batches(state, 1)[0]["input_ids"]).isfinite().all()
        torch.distributed.barrier()
        return [*after, str(bool(finite))]


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except fs.FullshardError as error:
        return str(error)
    return ""


# -- units that a step leaves out, buffers, forwards between ---------------------------------------------------------


class Halves(nn.Module):
    """Two blocks, of which a batch says which are used. `norm`: with BatchNorm."""

    def __init__(self, norm: bool = False):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(*_layers(norm)) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, used: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        x = self.embed(x)
        for i in used:
            x = x + self.blocks[i](x)
        return self.head(x)


def _layers(norm: bool) -> list[nn.Module]:
    return [nn.Linear(16, 16), nn.BatchNorm1d(16) if norm else nn.Tanh(), nn.Linear(16, 16)]


def halves(strategy: str, home: fs.Home, remat: str = "none", norm: bool = False, disk: str | None = None) -> on_torch.State:
    torch.manual_seed(0)
    model = Halves(norm)
    description = on_torch.describe(model, example=torch.randn(4, 8), loss=halves_loss, compute="fp32")
    plan = getattr(fs, strategy)(description, devices=torch.distributed.get_world_size(), batch=description.batch(4), remat=remat)
    plan = replace(plan, units=tuple(replace(u, home=home) for u in plan.units), cpu_share=None)
    share = None if home == fs.Home() else 0.5
    return on_torch.shard(model, plan, fs.AdamW(lr=1e-2, eps=1e-4), disk=disk, cpu_share=share, first_step_checks=False)


def halves_loss(model: nn.Module, batch: Any, used: tuple[int, ...] = (0, 1)) -> on_torch.Loss:
    return on_torch.Loss(model(batch, used).square().sum(), count=len(batch))


def whole_batch(index: int) -> torch.Tensor:
    return torch.randn(4 * torch.distributed.get_world_size(), 8, generator=torch.Generator().manual_seed(index))


def own_rows(index: int) -> torch.Tensor:
    return whole_batch(index).chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]


def skipped_units(strategy: str, home: fs.Home) -> tuple[float, list[float]]:
    """Five steps of which every other leaves a block out: the distance to the unsharded model, and the counts of updates."""
    with tempfile.TemporaryDirectory() as disk:
        state = halves(strategy, home, disk=disk if "disk" in (home.params, home.optimizer) else None)
        torch.manual_seed(0)
        alone = Halves()
        decays = [p for p in alone.parameters() if p.ndim > 1], [p for p in alone.parameters() if p.ndim < 2]
        groups = [{"params": decays[0]}, {"params": decays[1]}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, weight_decay=fs.AdamW().weight_decay)
        for group in optimizer.param_groups if not fs.AdamW().decay_all else ():
            group["weight_decay"] = fs.AdamW().weight_decay if group["params"][0].ndim > 1 else 0.0
        for i in range(5):
            used = (0, 1) if i % 2 else (0,)
            on_torch.train_step(state, [own_rows(i)], loss=lambda m, b, used=used: halves_loss(m, b, used), clip=1e9)
            (alone(whole_batch(i), used).square().sum() / len(whole_batch(i))).backward()
            optimizer.step()
            optimizer.zero_grad()
        with state.values() as values:
            worst = max((whole(v) - alone.get_parameter(n)).abs().max().item() for n, v in values.items())
            block = state.model.get_submodule("blocks.1").get_parameter("0.weight")
            return worst, [float(state.optimizer.state[block]["step"])]


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def statistics(remat: str) -> dict[str, float]:
    """How far BatchNorm's statistics are from those of the unsharded model after steps, and after one that is skipped."""
    state = halves("zero3", fs.Home(), remat, norm=True)
    torch.manual_seed(0)
    alone = Halves(norm=True)
    names = [n for n, _ in alone.named_buffers()]
    for _ in range(3):
        on_torch.train_step(state, [own_rows(0)], loss=halves_loss, clip=1e9, lr=0.0)
        alone(own_rows(0))
    found = {"steps": max((state.model.get_buffer(n) - alone.get_buffer(n)).abs().max().item() for n in names)}
    before = {n: state.model.get_buffer(n).clone() for n in names}
    result = on_torch.train_step(state, [own_rows(0) * float("nan")], loss=halves_loss, clip=1.0)
    assert bool(result.skipped)
    found["skipped"] = max((state.model.get_buffer(n) - before[n]).abs().max().item() for n in names)
    state.model.get_buffer(names[0]).fill_(float("nan"))
    with tempfile.TemporaryDirectory() as shared:
        directory = [shared]
        torch.distributed.broadcast_object_list(directory)
        found["said"] = said(lambda: fs.checkpoint.save(directory[0], state))
        torch.distributed.barrier()
    return found


def forwards_between(case: Case) -> float:
    """The distance of a loop with a forward between backward and step to one without."""
    with tempfile.TemporaryDirectory() as disk:
        runs = []
        for between in (True, False):
            state = homes.make(case, disk)
            for i in range(4):
                for batch in homes.batches(state, i):
                    (on_torch.summed_loss(state.model, batch) / 64).backward()
                if between:
                    (forward if i % 2 else forward_without_gradients)(state)
                state.optimizer.step()
                state.optimizer.zero_grad()
            runs.append(homes.values(state))
        return homes.apart(*runs)


# -- offloaded optimizer state beside parameters on the device -------------------------------------------------------


def averages(case: Case) -> float:
    """The distance of an average that the caller takes right after each step, of parameters it holds, to a resident run's."""
    with tempfile.TemporaryDirectory() as disk:
        found = []
        for each in (case, homes.resident(case)):
            state = homes.make(each, disk)
            held = list(state.model.parameters())
            average = [torch.zeros_like(p.to_local()) + p.detach().to_local() for p in held]
            for i in range(5):
                step(state, i)
                for a, p in zip(average, held, strict=True):
                    a.lerp_(p.detach().to_local(), 0.5)
            found.append(average)
        return max((a - b).abs().max().item() for a, b in zip(*found, strict=True) if a.numel())


def refusals(case: Case) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as disk:
        state = homes.make(case, disk)
        for batch in homes.batches(state, 0):
            on_torch.summed_loss(state.model, batch).backward()
        state.optimizer.step()
        p = state.model.get_parameter(NAME)
        found = {"second step": said(state.optimizer.step)}
        with torch.no_grad():
            found["write"] = said(lambda: p.mul_(0.5))
            found["write to data"] = said(lambda: p.data.zero_())
            found["write to shard"] = said(lambda: p.to_local().detach()[:1].fill_(1.0))
            found["write by list"] = said(lambda: torch._foreach_mul_([p.to_local()], 0.5))
        state = homes.make(replace(case, frozen="up_proj"), disk)
        step(state, 0)
        state.model.get_parameter(NAME).requires_grad_(True)
        found["unfrozen"] = said(lambda: step(state, 1))
        return found


def unfrozen(case: Case) -> list[Any]:
    """A resident parameter that is unfrozen between steps: what is said, and whether it trains once the optimizer has it."""
    with tempfile.TemporaryDirectory() as disk:
        state = homes.make(replace(case, frozen="layers.1."), disk)
        step(state, 0)
        p = state.model.get_parameter(NAME).requires_grad_(True)
        sentences = [said(lambda: step(state, 1)), said(state.optimizer.step)]
        state.optimizer.add_param_group({"params": [p]})
        before = p.detach().to_local().clone()
        step(state, 1)
        return [*sentences, bool((before != p.detach().to_local()).any())]


def own_reduction(case: Case) -> bool:
    """True if torch's FSDP is as torch made it, after steps of offloaded units."""
    own = _fsdp_collectives.foreach_reduce_scatter_copy_in
    with tempfile.TemporaryDirectory() as disk:
        plain(case, disk, 1)
    return own is _fsdp_collectives.foreach_reduce_scatter_copy_in and own.__module__ == _fsdp_collectives.__name__
