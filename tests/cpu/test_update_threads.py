"""Work shared out to threads: everything once, by whoever is free, and errors reach who waits."""

import threading
import time

import torch

from fullshard.on_torch.offload.updates.worker_threads import WorkerThreads


def shared(workers, call, parts):
    ended, errors = threading.Event(), []

    def end(error):
        errors.append(error)
        ended.set()

    workers.share(call, parts, end)
    assert ended.wait(100)
    return errors


def test_every_part_is_done_once_and_the_end_is_said_once():
    workers, seen = WorkerThreads("test", 3), []
    assert shared(workers, lambda i: seen.append(i), [(i,) for i in range(50)]) == [None]
    assert sorted(seen) == list(range(50))
    assert shared(workers, lambda: None, []) == [None]
    workers.close()


def test_a_thread_that_is_held_up_holds_up_its_own_part_only():
    workers, by = WorkerThreads("test", 2), {}

    def work(i):
        by[i] = threading.current_thread().name
        time.sleep(1.5 if i == 0 else 0.001)

    shared(workers, work, [(i,) for i in range(40)])
    assert sum(name == by[0] for name in by.values()) < 20  # half of them, were the parts dealt out beforehand
    workers.close()


def test_the_first_error_is_told_and_the_crew_goes_on():
    workers = WorkerThreads("test", 2)

    def work(i):
        if i == 3:
            raise ValueError("three")

    (error,) = shared(workers, work, [(i,) for i in range(8)])
    assert str(error) == "three"
    assert shared(workers, work, [(1,)]) == [None]
    workers.close()


def test_a_crew_keeps_to_its_cores_whatever_others_say_later():
    before = torch.get_num_threads()
    workers, later, found = WorkerThreads("test", 2), WorkerThreads("later", 1, cores=4), {1: [], 4: []}
    assert torch.get_num_threads() == before
    for each, own in ((workers, found[1]), (later, found[4])):
        # A sum is what makes a thread look at its setting for the first time.
        shared(each, lambda own=own: own.append((float(torch.ones(1 << 16).sum()), torch.get_num_threads())), [()] * 4)
        each.close()
    assert {n for _, n in found[1]} == {1}
    assert {n for _, n in found[4]} == {4}
    fresh = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [before]
