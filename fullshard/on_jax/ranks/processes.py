"""The processes of a run on JAX: joining them, and agreement between them.

A process has one or several devices. Agreement goes through the key-value store of `jax.distributed`, never through the devices,
so that a background thread may agree on something while the devices compute. Alone, a process agrees with itself.
"""

import itertools
import json
import os
import re
import threading
from collections import Counter
from typing import Any

import jax

from fullshard.base.errors import FullshardError
from fullshard.on_jax.private.jax_internals import coordination_client
from fullshard.plan.plan import Mesh
from fullshard.ranks.agreement import RankAgreement
from fullshard.ranks.local_ranks import ranks_here
from fullshard.ranks.messages import PolledMessages
from fullshard.ranks.slurm import adopt_slurm

TIMEOUT = 2 * 3600.0  # seconds: a process may have to wait for a slow disk
PROCESS_LOST = re.compile(r"unavailable|closed by peer|connection (was )?reset|heartbeat|coordination service", re.I)
START = 600  # seconds for processes that start late
_rounds: Counter[str] = Counter()  # calls of `gather` so far, by topic
_numbers = itertools.count()  # of agreements with a topic of their own
_alone: dict[str, str] = {}  # the store of a process without others


def start() -> None:
    """Join the processes that a launcher started (srun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets
    them), or be the only one. Idempotent.

    The coordinator listens one port above MASTER_PORT, which torchrun keeps for itself; JAX_COORDINATOR_ADDRESS names another.
    """
    adopt_slurm()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1 or coordination_client() is not None:
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which ends a run at a step
    jax.distributed.initialize(
        coordinator_address=_coordinator(),
        num_processes=world,
        process_id=int(os.environ["RANK"]),
        local_device_ids=_own_devices(),
        initialization_timeout=START,
    )


def _coordinator() -> str:
    given = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if given:
        return given
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise FullshardError("WORLD_SIZE is set, but not MASTER_ADDR and MASTER_PORT; start the ranks with torchrun or srun")
    return f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}"


def _own_devices() -> list[int] | None:
    """The devices of this process; None for all that it sees. Launchers start one process for each GPU of a machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    several = ranks_here() > 1 and (visible is None or "," in visible)
    return [int(os.environ.get("LOCAL_RANK", 0))] if several else None


def finish() -> None:
    """Leave the processes."""
    if coordination_client() is not None:
        jax.distributed.shutdown()


def index() -> int:
    """This process."""
    return jax.process_index() if coordination_client() is not None else 0


def count() -> int:
    """How many processes there are."""
    return jax.process_count() if coordination_client() is not None else 1


def is_first() -> bool:
    """True on process 0, which writes files and prints."""
    return index() == 0


def rank_and_world() -> tuple[int, int]:
    """This process, and the number of processes."""
    return index(), count()


def data_share(mesh: Mesh) -> tuple[int, int]:
    """Which share of a step's rows this process takes, and of how many. Processes that share a tensor group share their rows."""
    if count() == 1:
        return 0, 1
    each = mesh.devices // count()
    if mesh.devices % count() or (each % mesh.tensor and mesh.tensor % each):
        raise FullshardError(
            f"{count()} processes cannot share a mesh of {mesh}: mesh.tensor = {mesh.tensor} and the devices of a process must "
            "divide one another"
        )
    return index() * each // max(each, mesh.tensor), mesh.devices // max(each, mesh.tensor)


class CoordinatorMessages(PolledMessages):
    """Messages through the key-value store: no process needs another to be there. Values are JSON."""

    def put(self, key: str, value: Any) -> None:
        client, full = coordination_client(), f"fullshard/{key}"
        if client is None:
            _alone[full] = json.dumps(value)
        else:
            client.key_value_set(full, json.dumps(value), allow_overwrite=True)

    def get(self, key: str) -> Any:
        """The value of `key`, or None if it was never put."""
        client, full = coordination_client(), f"fullshard/{key}"
        if client is None:
            return json.loads(_alone[full]) if full in _alone else None
        try:
            return json.loads(client.key_value_try_get(full))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def claim(self, key: str) -> bool:
        client, full = coordination_client(), f"fullshard/{key}"
        if client is None:
            return _alone.setdefault(full, own := json.dumps(len(_alone))) is own
        try:
            client.key_value_set(full, "1", allow_overwrite=False)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True


def lost_a_peer(error: BaseException) -> bool:
    """True if an error only says that another process is gone."""
    return isinstance(error, jax.errors.JaxRuntimeError) and bool(PROCESS_LOST.search(str(error)))


_guard = threading.Lock()


class ProcessAgreement(RankAgreement):
    """All processes, under a topic that belongs to one thread."""

    def __init__(self, topic: str):
        self.topic, self.rank, self.world = topic, index(), count()

    def gather(self, value: Any) -> list[Any]:
        """Calls with one topic must come in the same order on every process."""
        value = json.loads(json.dumps(value))
        if self.world == 1:
            return [value]
        with _guard:
            _rounds[self.topic] += 1
            at = _rounds[self.topic]
        client, own = coordination_client(), lambda i, process: f"fullshard/gather/{self.topic}/{i}/{process}"
        client.key_value_set(own(at, self.rank), json.dumps(value))
        found = [json.loads(client.blocking_key_value_get(own(at, r), int(TIMEOUT * 1000))) for r in range(self.world)]
        if at > 1:  # all have begun this round, so all have read the one before it
            client.key_value_delete(own(at - 1, self.rank))
        return found


def own_agreement(what: str) -> ProcessAgreement:
    """An agreement whose topic nobody else has. `what` begins its name. Every process makes these in the same order, so that
    equal numbers belong together."""
    return ProcessAgreement(f"{what}-{next(_numbers)}")


def main_agreement() -> ProcessAgreement:
    """The agreement of main threads."""
    return ProcessAgreement("main")
