"""Plays a leg of a case on live ranks: each operation on the state and on the oracle, and what they hold against each other."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import fullshard as fs
from fullshard import on_torch
from tests.fuzz.orders.case import Action, Case, PlanChoice
from tests.fuzz.orders.faults import ERRORS, Trap, scaled_activations
from tests.fuzz.orders.oracle import Kept, Oracle, Values, micro_loss
from tests.fuzz.orders.subject import make_state, read
from tests.fuzz.orders.toy import build, global_batch

T = TypeVar("T")
Saved = tuple[str, Values | None, set[str], Kept]
# Of elements of size 1. With lr 0.02 and eps 1e-3 a step of the unsharded model in fp32 is up to 2.3e-5 from one in fp64; in bf16
# two updates may differ in sign.
TOLERANCE = {"fp32": 5e-5, "bf16": 6e-2}
MOMENTS = {"fp32": 1e-3, "bf16": 0.3}
OUTPUT = {"fp32": 1e-4, "bf16": 0.3}
# Sentences after which a state is of no use until a checkpoint is loaded: both say so.
GIVEN_UP = (
    "without clipping units are updated before that is known",
    "a step failed after some of its updates were done",
    "its forward saved no tensor of at least",
)


class Wrong(AssertionError):
    """The state is not what it must be."""


class Refused(Exception):
    """The state has said in a sentence that it does not do this."""


class Ended(Exception):
    """The state has said in a sentence that this play cannot go on: a plan that it does not carry out."""


class Play:
    """`saves`: directory, what was read of the state, what the oracle had. `exact`: what was read last, until something changes
    it."""

    def __init__(self, case: Case, leg: int, directory: str):
        self.case, self.number, self.directory = case, leg, Path(directory)
        self.saves: list[Saved] = []
        self.kept: dict[str, Any] = {}
        self.exact: Values | None = None
        self.moved: set[str] = set()  # buffers that `exact` does not tell of
        self.action: Action | None = None  # the one that runs
        self.oracle = Oracle(case.shape, build(case.shape, case.seed), case.optimizer, foreach=not case.attached)
        self.next_state(case.legs[leg].plan)
        if leg:
            self._go_on(leg - 1)

    def next_state(self, choice: PlanChoice) -> None:
        """A new state, of another plan. What is loaded into it comes next."""
        self.choice, self.exact, self.state = choice, None, None
        gc.collect()
        try:
            self.state = make_state(self.case, choice, str(self.directory))
        except fs.FullshardError as error:
            raise Ended(f"plan: {error}") from error
        self.kept.clear()
        self.oracle.spread(self.state.plan.mesh.data, self.choice.accumulate)

    # -- what is held against each other ---------------------------------------------------------------------------

    def subject(self, function: Callable[[], T]) -> T:
        """What only the state does. A sentence from it is a refusal."""
        try:
            return function()
        except fs.FullshardError as error:
            self._recover(error)
            raise Refused(str(error)) from error

    def _recover(self, error: Exception) -> None:
        """Load the last checkpoint, if the state says that it needs one. Without any the play ends."""
        sentence = " ".join([str(error), *getattr(error, "__notes__", ())])
        if not any(text in sentence for text in GIVEN_UP):
            return
        if not self.saves:
            raise Ended(sentence)
        self.load(self.saves[-1])

    def changes(self) -> None:
        self.exact = None

    def look(self, reader: str) -> Values:
        """Read the state. It must be the oracle's, and to the bit what it was if nothing has changed it."""
        found = self.subject(lambda: read(self.state, reader))
        self._agree(self._wrong(found, self.oracle.values()))
        if self.exact is not None:
            self._agree(
                self._wrong({n: t for n, t in found.items() if n not in self.moved}, self.exact, exact=True),
                "which nothing has changed since it was read last",
            )
        if self.case.compute != "fp32":
            self.oracle.adopt(found)
        self.exact, self.moved = found, set()
        return found

    def _wrong(self, found: Values, wanted: Values, *, exact: bool = False) -> str | None:
        """The tensor that is furthest off. What is absent is zero: moments before the first update."""
        worst, where = 1.0, None
        for name in sorted(found.keys() | wanted.keys()):
            if name.endswith("mu_product") and (name not in found or name not in wanted):
                continue  # NAdam's begins at 1
            a, b = (v.get(name, torch.zeros(())) for v in (found, wanted))
            apart = float((a - b).abs().max())
            limit = 0.0 if exact else self._tolerance(name, float(b.abs().max()))
            if not apart <= limit and not apart / max(limit, 1e-30) <= worst:
                worst, where = apart / max(limit, 1e-30), f"{name} is {apart:.2g} off"
        return where

    def _tolerance(self, name: str, size: float) -> float:
        """Of weights and buffers, in units of one; of moments, which are small, in units of their largest element."""
        if name in self.oracle.names or name in self.oracle.sides[0]:
            return TOLERANCE[self.case.compute] * max(1.0, size)
        floor = 1e-6 if name.endswith(("_sq", ".sum", "square_avg")) else 1e-3
        return MOMENTS[self.case.compute] * max(size, floor)

    def _agree(self, wrong: str | None, more: str = "") -> None:
        """Raise on all ranks what the first of them has found."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, wrong)
        if any(found):
            raise Wrong(" ".join([next(w for w in found if w), more]).strip())

    # -- steps -------------------------------------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """Of the action, for its data."""
        return self.action.index

    def micro_batches(self) -> list[dict[str, Tensor]]:
        batch, rank = global_batch(self.case.shape, self.index), on_torch.data_rank(self.state.plan.mesh)
        return [self.oracle.micro_batch(batch, rank, micro) for micro in range(self.choice.accumulate)]

    def train_step(self, *, clip: float | None, loss: str, idle: tuple[int, ...]) -> None:
        self.state.model.idle = idle
        result = self.subject(lambda: on_torch.train_step(self.state, self.micro_batches(), clip=clip, loss=_loss(loss)))
        self.changes()
        if bool(result.skipped):
            raise Wrong("the step was skipped")
        self.oracle.drop()
        self.oracle.backward(self.index, idle)
        self.oracle.update(clip)
        self.oracle.drop()

    def backward(self, idle: tuple[int, ...], trap: Trap | None = None) -> None:
        self.state.model.idle = idle
        self.subject(lambda: self._backward(trap))
        self.moves_buffers()
        self.oracle.backward(self.index, idle, trap)

    def _backward(self, trap: Trap | None) -> None:
        batches = self.micro_batches()
        factor = on_torch.loss_factor(self.state, [(b["labels"] != -100).sum() for b in batches])
        for micro, batch in enumerate(batches):
            loss = micro_loss(self.state.model, batch, trap if trap is not None and trap.micro == micro else None)
            (loss * factor).backward()

    def update(self, clip: float | None) -> None:
        self.subject(lambda: self._update(clip))
        self.changes()
        self.oracle.update(clip)

    def _update(self, clip: float | None) -> None:
        if clip is not None:
            on_torch.clip_grad_norm_(self.state.parameters(), clip)
        self.state.optimizer.step()

    def drop(self) -> None:
        self.state.optimizer.zero_grad()
        self.oracle.drop()

    def failing_step(self, trap: Trap, loss: str) -> None:
        """`train_step` leaves everything as it was."""
        self.state.model.idle = ()
        step = lambda: on_torch.train_step(self.state, self.micro_batches(), loss=_trapped_loss(loss, trap))
        self._raises(trap, lambda: self.subject(step))

    def failing_backward(self, trap: Trap) -> None:
        """The caller's own forward has moved buffers until it raised, as in torch."""
        self.state.model.idle = ()
        self._raises(trap, lambda: self.subject(lambda: self._backward(trap)))
        self.moves_buffers()
        self._raises(trap, lambda: self.oracle.backward(self.index, (), trap))

    def _raises(self, trap: Trap, function: Callable[[], Any]) -> None:
        try:
            function()
        except ERRORS[trap.error] as error:
            if "planted" not in str(error):
                raise
            self._recover(error)
        else:
            raise Wrong("what the caller's code raised did not arrive")

    def skipped_step(self, kind: str, clip: float | None, loss: str) -> None:
        self.state.model.idle = ()
        own = _loss(loss)
        if kind == "loss":
            own = _scaled_loss(loss, float("nan"))
        elif kind == "overflow":
            own = _overflowing_loss(loss)
        with scaled_activations(self.state.model, float("nan") if kind == "activations" else 1.0):
            result = self.subject(lambda: on_torch.train_step(self.state, self.micro_batches(), clip=clip, loss=own))
        if not bool(result.skipped):
            raise Wrong("the step was not skipped")
        self.oracle.drop()

    def moves_buffers(self) -> None:
        """What was read last of buffers no longer holds."""
        self.moved = set(self.oracle.sides[0])
        if self.exact is not None:
            self.exact = {n: t for n, t in self.exact.items() if n not in self.moved}

    # -- without a step ------------------------------------------------------------------------------------------------

    def forward(self, *, gradients: bool, training: bool, idle: tuple[int, ...]) -> None:
        self.state.model.idle = idle
        batch = self.micro_batches()[0]
        self.state.model.train(training)
        with torch.set_grad_enabled(gradients):
            found = self.subject(lambda: self.state.model(batch["input_ids"])).detach().double()
        self.state.model.train()
        if training:
            self.moves_buffers()
        wanted = self.oracle.forward(self.index, idle, training=training)[on_torch.data_rank(self.state.plan.mesh)]
        apart = float((found - wanted).abs().max())
        self._agree(None if apart <= OUTPUT[self.case.compute] else f"a forward's output is {apart:.2g} off")

    def evaluate(self) -> None:
        self.state.model.idle = ()
        loss = self.subject(lambda: on_torch.evaluate(self.state, self.micro_batches()))["loss"]
        wanted = self.oracle.evaluate(self.index)
        self.moves_buffers()
        apart = abs(loss - wanted)
        self._agree(None if apart <= OUTPUT[self.case.compute] else f"the loss of evaluate is {apart:.2g} off")

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        where = self._next_directory()
        self.subject(lambda: fs.checkpoint.save(where, self.state))
        self._remember(where)

    def _next_directory(self) -> str:
        return str(self.directory / f"save-{self.number}-{len(self.saves)}")

    def _remember(self, where: str) -> None:
        self.oracle.average()
        self.moves_buffers()
        self.saves.append((where, self.exact, self.moved, self.oracle.keep()))

    def save_behind(self, step: Callable[[], None]) -> None:
        """Save in the background of a step. The checkpoint has what was there before it."""
        where = self._next_directory()
        writer = self.subject(lambda: on_torch.Checkpointer(where, self.state, overlap=True))
        try:
            saving = self.subject(writer.save)
            self._remember(where)
            step()
            saving.result()
        finally:
            writer.close()

    def load(self, saved: Saved) -> None:
        where, exact, moved, kept = saved
        self.subject(lambda: fs.checkpoint.load(where, self.state))
        sides = [copy.deepcopy(kept["sides"][0]) for _ in self.oracle.sides]
        self.oracle.put(kept | {"sides": sides})
        self.exact, self.moved = exact, moved

    def move(self, plan: PlanChoice) -> None:
        self.next_state(plan)
        self.load(self.saves[-1])

    def leave(self, leg: int) -> None:
        """Save for the next leg."""
        self.save()
        if dist.get_rank() == 0:
            torch.save(self.saves[-1], self.directory / f"leg-{leg}.pt")
        dist.barrier()

    def _go_on(self, leg: int) -> None:
        self.load(torch.load(self.directory / f"leg-{leg}.pt", weights_only=False))

    def copied_optimizer_state(self) -> dict[str, Any]:
        return copy.deepcopy(self.state.optimizer.state_dict())


# -- losses of train_step -------------------------------------------------------------------------------------------------


def _loss(name: str) -> Callable[..., Any]:
    return on_torch.summed_loss if name == "summed" else _counted


def _counted(model: torch.nn.Module, batch: dict[str, Tensor]) -> on_torch.Loss:
    return on_torch.Loss(on_torch.summed_loss(model, batch), (batch["labels"] != -100).sum(), {"rows": (len(batch["labels"]), 1)})


def _of(name: str, total: Tensor, batch: dict[str, Tensor]) -> Any:
    return total if name == "summed" else on_torch.Loss(total, (batch["labels"] != -100).sum())


def _scaled_loss(name: str, factor: float) -> Callable[..., Any]:
    return lambda model, batch: _of(name, on_torch.summed_loss(model, batch) * factor, batch)


def _overflowing_loss(name: str) -> Callable[..., Any]:
    """Finite, with a gradient that is not."""

    def loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> Any:
        total = on_torch.summed_loss(model, batch)
        return _of(name, total + (total * 0).sqrt(), batch)

    return loss


def _trapped_loss(name: str, trap: Trap) -> Callable[..., Any]:
    """Raises in one of the micro-batches that gradients are taken of."""
    passes = iter(range(1000))

    def loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> Any:
        here = torch.is_grad_enabled() and next(passes) == trap.micro
        return _of(name, micro_loss(model, batch, trap if here else None), batch)

    return loss
