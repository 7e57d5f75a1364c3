"""Answers questions about plans in a thread, the newest of each tab only, and remembers the last answers."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from fullshard.observe.page.plan_request import PlanQuestion

KEPT = 64  # answers
Answer = Callable[[PlanQuestion, Callable[[], None]], dict[str, Any]]


class SupersededError(Exception):
    """The tab has asked something else meanwhile."""


class PlanWorker:
    """One thread: searches are pure Python, so that two at once would take twice as long each."""

    def __init__(self, answer: Answer):
        self.answer = answer
        self.newest: dict[str, int] = {}  # of each tab, the number of its newest question
        self.known: OrderedDict[PlanQuestion, dict[str, Any]] = OrderedDict()
        self.asked: SimpleQueue[tuple[str, int, PlanQuestion, Future[dict[str, Any]]]] = SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True, name="plans")  # it must not hold up the end
        self.thread.start()

    def ask(self, tab: str, question: PlanQuestion) -> "Future[dict[str, Any]]":
        """The answer to come. An earlier question of the same tab ends in `SupersededError`."""
        if tab not in self.newest and len(self.newest) >= KEPT:
            self.newest.pop(next(iter(self.newest)))
        self.newest[tab] = number = self.newest.get(tab, 0) + 1
        future: Future[dict[str, Any]] = Future()
        if question in self.known:
            self.known.move_to_end(question)
            future.set_result(self.known[question])
        else:
            self.asked.put((tab, number, question, future))
        return future

    def _work(self) -> None:
        while True:
            tab, number, question, future = self.asked.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._answered(tab, number, question))
            except BaseException as error:
                future.set_exception(error)

    def _answered(self, tab: str, number: int, question: PlanQuestion) -> dict[str, Any]:
        def check() -> None:
            if self.newest.get(tab) != number:
                raise SupersededError

        check()
        answer = self.answer(question, check)
        self.known[question] = answer
        while len(self.known) > KEPT:
            self.known.popitem(last=False)
        return answer
