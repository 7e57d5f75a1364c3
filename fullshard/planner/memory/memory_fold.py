"""Plays what the operations of a step allocate and free onto a tape: one rank's device, and what is spilled from it."""

from collections.abc import Callable, Iterable

from fullshard.model.description import Description
from fullshard.model.kernel_workspaces import CUBLAS_WORKSPACE
from fullshard.plan.plan import HomeName, Plan
from fullshard.planner.memory.allocation_tape import Tape
from fullshard.planner.memory.section_events import folded_events, sized_events
from fullshard.planner.step import begin_events
from fullshard.planner.step.effects import (
    COMPUTE,
    TRANSFER,
    Allocate,
    AllocateBeside,
    AllocateOnce,
    AllocateRow,
    Event,
    Free,
    FreeAll,
    FreeRow,
    Leave,
    Rename,
    ReplaceRow,
    Return,
    RunSection,
    Term,
)
from fullshard.planner.step.few_blocks import SteadyBlocks
from fullshard.planner.step.lowering import LoweredStep
from fullshard.planner.step.offload_bytes import OffloadBytes
from fullshard.planner.step.phases import BACKWARD, LOSS
from fullshard.planner.step.saved_activations import Saved, SpilledBytes
from fullshard.planner.step.schedule import Operation


class MemoryFold:
    """Plays the steps of a plan onto a tape. `cublas`: whether cuBLAS multiplies, as it does on a GPU."""

    def __init__(self, tape: Tape, plan: Plan, description: Description, away: OffloadBytes, *, cublas: bool):
        self.tape, self.plan, self.description, self.away, self.cublas = tape, plan, description, away, cublas
        self.spilled: SpilledBytes[Term] = SpilledBytes()  # activations off the device
        self.at = 0
        self.verbs: dict[type, Callable[..., None]] = {
            Allocate: tape.allocate,
            AllocateBeside: tape.allocate_beside,
            AllocateOnce: tape.allocate_once,
            AllocateRow: tape.allocate_row,
            Free: tape.free,
            FreeAll: tape.free_all,
            FreeRow: tape.free_row,
            Leave: self._leave,
            Rename: tape.rename,
            ReplaceRow: tape.replace_row,
            Return: self._return,
            RunSection: self._run,
        }

    def rest(self) -> None:
        """Allocate what is there before the first step."""
        self._play(begin_events.rest(self.plan, self.description, self.away))

    def begin(self) -> None:
        """Allocate what is there when a steady step begins: one that is not the first."""
        self.rest()
        self._play(begin_events.states(self.plan, self.away))
        self._play(begin_events.left_over(self.away))
        self._workspaces("forward", "backward")

    def step(self, lowered: LoweredStep, watch: SteadyBlocks | None = None) -> bool:
        """Play one step. `watch`: of operations of few blocks. Return False if they do not become steady."""
        self.at, verbs = 0, self.verbs
        batch = list(begin_events.batch(self.plan, self.description))
        self._play(batch)
        for op, effects in lowered:
            if watch and not watch.at(op):
                return False
            for event in effects.events:
                verbs[type(event)](*event, self.at)
            self.at += 1
        self._play(Free(tensor.owner, tensor.tensor) for tensor in batch)
        return watch is None or watch.passed

    def _play(self, events: Iterable[Event]) -> None:
        for event in events:
            self.verbs[type(event)](*event, self.at)

    def _workspaces(self, *threads: str) -> None:
        """Allocate cuBLAS's workspaces: one for the thread that runs forward, one for autograd's."""
        for thread in threads if self.cublas else ():
            if ("workspace", thread) not in self.tape.alive:
                self.tape.allocate("workspace", thread, CUBLAS_WORKSPACE, "workspace", COMPUTE, self.at)

    def _run(self, op: Operation, at: int) -> None:
        section = op.section
        assert section is not None
        thread = "backward" if op.phase in BACKWARD else "forward"
        owners = {"": op.unit, "<": op.near[0], ">": op.near[1], "/": ""}
        term: Term = "loss" if op.phase in LOSS or not op.unit else "activations"
        allocate, free = self.tape.allocate, self.tape.free  # looked up once, for speed
        events = folded_events if self.tape.folds else sized_events
        for action, tensor, unit, nbytes in events(section, *op.shape):
            owner = owners.get(unit, unit)
            if action == "allocate":
                allocate(owner, tensor, nbytes, "whole gradients" if tensor.startswith("grad:") else term, COMPUTE, at)
            elif action == "free":
                free(owner, tensor, at)
                self.spilled.pop((owner, tensor))
            elif action == "rise":
                self.tape.rise(nbytes)
            elif action == "multiply":
                self._workspaces(thread)
            elif (owner, f"whole:{tensor}") in self.tape.alive:
                free(owner, tensor, at)  # it was added to the sum of earlier micro-batches

    def _leave(self, unit: str, place: HomeName, saved: tuple[Saved, ...], at: int) -> None:
        keys = [(s.owner, s.tensor) for s in saved]
        gone = {key: found[1:3] for key in keys if (found := self.tape.alive.get(key))}
        self.spilled.add(unit, place, gone)
        for owner, tensor in gone:
            self.tape.free(owner, tensor, at)

    def _return(self, saved: tuple[Saved, ...], at: int) -> None:
        for s in saved:
            if found := self.spilled.pop((s.owner, s.tensor)):
                self.tape.allocate(s.owner, s.tensor, *found, TRANSFER, at)
