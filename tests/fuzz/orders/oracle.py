"""What a state must be: the unsharded model in fp64, and torch's own optimizer."""

import copy
from typing import Any

import torch
from torch import Tensor

import fullshard as fs
from fullshard import on_torch
from fullshard.plan.optimizer import Optimizer
from tests.fuzz.orders.faults import Trap, trapped
from tests.fuzz.orders.toy import Shape, Toy, global_batch, part

Values = dict[str, Tensor]
Kept = dict[str, Any]  # what `Oracle.keep` returns


def micro_loss(model: torch.nn.Module, micro: dict[str, Tensor], trap: Trap | None) -> Tensor:
    """The summed loss of a micro-batch, with a trap in its way."""
    if trap is not None and trap.place == "before":
        trap.spring()
    with trapped(model, trap):
        loss = on_torch.summed_loss(model, micro)
    return trap.at(loss) if trap is not None and trap.place == "after" else loss


class Oracle:
    """`sides`: for each data rank, the buffers that its micro-batches have moved."""

    def __init__(self, shape: Shape, model: Toy, optimizer: Optimizer, *, foreach: bool = True):
        self.shape, self.model = shape, model.double()
        self.names = [n for n, _ in self.model.named_parameters()]
        self.optimizer = torch_optimizer(self.model, optimizer, foreach=foreach)
        self.spread(1, 1)

    def spread(self, data: int, accumulate: int) -> None:
        """From here on, batches are split over so many data ranks and micro-batches, of a new state that trains all that is
        trained."""
        self.accumulate, self.parts = accumulate, data * accumulate
        self.sides = [{n: b.clone() for n, b in self.model.named_buffers()} for _ in range(data)]
        for p in (p for group in self.optimizer.param_groups for p in group["params"]):
            p.grad = None
            p.requires_grad_(True)

    # -- a step --------------------------------------------------------------------------------------------

    def backward(self, index: int, idle: tuple[int, ...] = (), trap: Trap | None = None) -> None:
        """Add the gradients of the mean over all that counts. Each micro-batch is done for all ranks before the next."""
        batch, self.model.idle = global_batch(self.shape, index), idle
        count = (batch["labels"] != -100).sum()
        for micro in range(self.accumulate):
            here = trap if trap is not None and trap.micro == micro else None
            losses = [self._of_rank(batch, rank, micro, here) for rank in range(len(self.sides))]
            if all(isinstance(loss, Tensor) for loss in losses):
                (sum(losses) / count).backward()
            else:
                raise losses[0]

    def _of_rank(self, batch: dict[str, Tensor], rank: int, micro: int, trap: Trap | None) -> Any:
        """The loss, or what it raised: every rank raises, each after its buffers have moved."""
        self._enter(rank)
        try:
            return micro_loss(self.model, self.micro_batch(batch, rank, micro), trap)
        except Exception as error:
            return error

    def micro_batch(self, batch: dict[str, Tensor], rank: int, micro: int) -> dict[str, Tensor]:
        return part(batch, rank * self.accumulate + micro, self.parts)

    def update(self, clip: float | None = None) -> None:
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()

    def drop(self) -> None:
        self.optimizer.zero_grad()

    # -- without a step --------------------------------------------------------------------------------------

    def forward(self, index: int, idle: tuple[int, ...], *, training: bool) -> list[Tensor]:
        """The outputs of each rank's first micro-batch."""
        batch, found, self.model.idle = global_batch(self.shape, index), [], idle
        self.model.train(training)
        for rank in range(len(self.sides)):
            self._enter(rank)
            with torch.no_grad():
                found.append(self.model(self.micro_batch(batch, rank, 0)["input_ids"]))
        self.model.train()
        return found

    def evaluate(self, index: int) -> float:
        self.average()
        batch, self.model.idle = global_batch(self.shape, index), ()
        self._enter(0)
        self.model.eval()
        with torch.no_grad():
            loss = on_torch.summed_loss(self.model, batch) / (batch["labels"] != -100).sum()
        self.model.train()
        return float(loss)

    def average(self) -> None:
        """Give all ranks the mean of their running statistics."""
        mean = self.buffers()
        self.sides = [{n: t.to(side[n].dtype, copy=True) for n, t in mean.items()} for side in self.sides]

    def _enter(self, rank: int) -> None:
        """Compute with this rank's buffers. Not copied: backward knows those that its forward had."""
        for name, buffer in self.sides[rank].items():
            path, _, leaf = name.rpartition(".")
            self.model.get_submodule(path)._buffers[leaf] = buffer

    # -- the state ---------------------------------------------------------------------------------------------

    def buffers(self) -> Values:
        """Their means over data ranks."""
        return {n: torch.stack([side[n].double() for side in self.sides]).mean(0) for n in self.sides[0]}

    def values(self) -> Values:
        found = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            for key, slot in self.optimizer.state.get(p, {}).items():
                if slot is not None:
                    found[f"{name}.{key}"] = torch.as_tensor(slot, dtype=torch.float64).clone()
        return found | self.buffers()

    def adopt(self, values: Values) -> None:
        """Go on from what a sharded state has: where rounding would add up."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(values[name])
                for key, slot in self.optimizer.state.get(p, {}).items():
                    if isinstance(slot, Tensor) and f"{name}.{key}" in values:
                        slot.copy_(values[f"{name}.{key}"])

    def keep(self) -> Kept:
        return copy.deepcopy(self.keep_model() | self.keep_optimizer())

    def keep_model(self) -> Kept:
        return copy.deepcopy({"model": {n: p.detach() for n, p in self.model.named_parameters()}, "sides": self.sides})

    def keep_optimizer(self) -> Kept:
        return copy.deepcopy({"optimizer": self.optimizer.state_dict()})

    def put(self, kept: Kept) -> None:
        """Go back to what was kept."""
        kept = copy.deepcopy(kept)
        with torch.no_grad():
            for name, value in kept.get("model", {}).items():
                self.model.get_parameter(name).copy_(value)
        self.sides = kept.get("sides", self.sides)
        if "optimizer" in kept:
            self.optimizer.load_state_dict(kept["optimizer"])


def torch_optimizer(model: torch.nn.Module, spec: Optimizer, *, foreach: bool) -> torch.optim.Optimizer:
    """`foreach`: as shards have it, for SGD. With it, Nesterov's momentum changes gradients."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": params}]
    if not spec.decay_all:
        groups = [
            {"params": [p for p in params if p.ndim > 1]},
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
        ]
    if isinstance(spec, fs.TorchOptimizer):
        return getattr(torch.optim, spec.name)(groups, lr=spec.lr, **dict(spec.options))
    options = {k: v for k, v in vars(spec).items() if k != "decay_all"}
    if isinstance(spec, fs.SGD):
        return torch.optim.SGD(groups, foreach=foreach, **options)
    return (torch.optim.AdamW if isinstance(spec, fs.AdamW) else torch.optim.Adam)(groups, **options)
