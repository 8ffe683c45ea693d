"""Where many tasks run: in this process, in several, or on a Ray cluster. They leave what they find in files."""

import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import torch

from calgp.errors import CalgpError, name_error
from calgp.runs.failures import Interrupted, signals_handled
from calgp.runs.process import tune_process

FAILURES = (CalgpError, RuntimeError, MemoryError)  # of one task; the others go on
RETRIES = 3  # of a task whose process died; what it has saved is not done again
STOPPED = "Stopped; nothing is lost. The same command goes on where it was."

Task = TypeVar("Task")
TaskSeen = TypeVar("TaskSeen", contravariant=True)


class Work(Protocol[TaskSeen]):
    """What is done with a task. It may be killed at any moment and done again."""

    def __call__(self, task: TaskSeen, /, *, watch: Callable[[float], None]) -> None: ...


@dataclass(frozen=True)
class RunningTask(Generic[Task]):
    """A task under way, and which share of it is done, where the engine can tell."""

    task: Task
    share: float | None = None


class Engine(ABC):
    """Does many tasks."""

    @abstractmethod
    def run(
        self,
        work: Work[Task],
        tasks: Sequence[Task],
        *,
        ended: Callable[[Task, str | None], None],
        watch: Callable[[Sequence[RunningTask[Task]]], None],
    ) -> None:
        """Do the work of all tasks; `ended` hears of each, with the reason if it failed, `watch` of those under way.

        Ctrl-C raises Interrupted when those under way have saved themselves; a second one does not wait for them.
        """


@dataclass(frozen=True)
class SerialEngine(Engine):
    """One task after the other, in this process."""

    def run(self, work, tasks, *, ended, watch) -> None:
        for task in tasks:
            watch([RunningTask(task, 0.0)])
            ended(task, _attempt(work, task, lambda share, task=task: watch([RunningTask(task, share)])))


@dataclass(frozen=True)
class Processes(Engine):
    """Several tasks at a time, each in a process of one thread; one that dies is replaced, its task done again.

    joblib was tried in its place: a worker that the system kills ends all tasks there (results/notes/scaling.md).
    """

    jobs: int

    def run(self, work, tasks, *, ended, watch) -> None:
        context = _context()
        stop, waiting, deaths = context.Event(), deque(range(len(tasks))), Counter[int]()
        free = [_Slot(context, stop) for _ in range(min(self.jobs, len(tasks)))]
        busy: dict[Future[str | None], tuple[_Slot, int]] = {}
        try:
            while waiting or busy:
                while waiting and free:
                    slot, index = free.pop(), waiting.popleft()
                    busy[slot.submit(work, tasks[index])] = slot, index
                over, _ = wait(busy, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in over:
                    slot, index = busy.pop(future)
                    try:
                        failure = future.result()
                    except BrokenProcessPool:
                        slot.close()
                        slot, deaths[index] = _Slot(context, stop), deaths[index] + 1
                        if deaths[index] <= RETRIES:
                            free.append(slot)
                            waiting.append(index)
                            continue
                        failure = _DIED.format(RETRIES + 1)
                    free.append(slot)
                    ended(tasks[index], failure)
                watch([RunningTask(tasks[index]) for _, index in busy.values()])
        except BaseException as error:
            stop.set()
            _save(busy)
            if isinstance(error, KeyboardInterrupt | Interrupted):
                raise Interrupted(STOPPED) from None
            raise
        finally:
            slots = [*free, *(slot for slot, _ in busy.values())]
            for wait_for_it in (False, True):  # they end at the same time
                for slot in slots:
                    slot.close(wait_for_it)


def _context() -> Any:
    """How processes begin. torch's threads do not survive a fork, so that this process cannot be forked itself.

    On Linux they are forks of one that has imported everything and computed nothing; elsewhere each imports it again.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["calgp.search.jobs"])
    return context


_DIED = "its process died {} times, perhaps for want of memory; try fewer --jobs"


class _Slot:
    """A pool of one process, so that it has one task at a time and dies alone."""

    def __init__(self, context: Any, stop: Any) -> None:
        self.pool = ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(stop, dict(os.environ)))
        with signals_handled(signal.SIG_IGN, signal.SIGINT):  # a process starts as deaf to Ctrl-C as its parent is
            self.process = self.pool.submit(os.getpid)

    def submit(self, work: Work[Task], task: Task) -> Future[str | None]:
        return self.pool.submit(_interruptible_attempt, work, task)

    def signal(self, number: int) -> None:
        """Send a signal to the process; one that has not begun yet asks by itself whether to stop."""
        if self.process.done() and self.process.exception() is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.result(), number)

    def close(self, wait_for_it: bool = True) -> None:
        self.pool.shutdown(wait=wait_for_it, cancel_futures=True)


def _save(busy: dict[Future[str | None], tuple[_Slot, int]]) -> None:
    """Let those under way save themselves; a second Ctrl-C ends them at once."""
    try:
        for slot, _ in busy.values():
            slot.signal(signal.SIGINT)
        wait(busy)
    except KeyboardInterrupt:
        for slot, _ in busy.values():
            slot.signal(getattr(signal, "SIGKILL", signal.SIGTERM))


def _attempt(work: Work[Task], task: Task, watch: Callable[[float], None] = lambda share: None) -> str | None:
    """Why a task failed; None if it did not."""
    try:
        work(task, watch=watch)
    except (Interrupted, KeyboardInterrupt):
        raise Interrupted(STOPPED) from None
    except FAILURES as error:
        return str(error) or type(error).__name__
    return None


_stop: Any = None  # in a process of the pool: whether nothing more is to be begun


def _interruptible_attempt(work: Work[Task], task: Task) -> str | None:
    """Ctrl-C is the parent's business, which sends it on: a training saves itself, all else is done again."""
    with signals_handled(signal.default_int_handler, signal.SIGINT):
        if _stop is not None and _stop.is_set():
            raise Interrupted(STOPPED)
        return _attempt(work, task)


def _begin(stop: Any, environment: dict[str, str]) -> None:
    global _stop
    _stop = stop
    os.environ.update(environment)  # a fork has that of the first pool
    work_alone()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a terminal's Ctrl-C goes to the parent alone
    threading.Thread(target=_follow_parent, daemon=True).start()


def work_alone() -> None:
    """What a process that works for another needs first: one thread and no chatter."""
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning_fabric")
    tune_process()
    torch.set_num_threads(1)


def _follow_parent() -> None:
    """A parent that is killed cannot end its processes: they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@dataclass(frozen=True)
class Ray(Engine):
    """Tasks of a Ray cluster: the one at `address`, else one of `jobs` processes on this machine, for its time.

    All machines must see the same folders under the same paths. A task whose process or machine died is done again.
    gpus: what a task asks for, such as 1 or 0.25; one that asks for none has none.
    """

    jobs: int
    address: str | None = None
    gpus: float = 0.0

    def run(self, work, tasks, *, ended, watch) -> None:
        ray = _ray()
        begun = not ray.is_initialized()
        if begun:
            self._connect(ray)
        try:
            self._run(ray, work, tasks, ended, watch)
        finally:
            if begun:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        address = self.address or os.environ.get("RAY_ADDRESS")
        try:
            if address is None:
                ray.init(address="local", num_cpus=self.jobs, include_dashboard=False, **quiet)
            else:
                ray.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            where = f"at {address}" if address else "on this machine"
            raise CalgpError(f"There is no Ray cluster {where}: {str(error).splitlines()[0]}") from None

    def _run(self, ray: Any, work: Work[Task], tasks: Sequence[Task], ended: Any, watch: Any) -> None:
        remote = ray.remote(num_cpus=1, num_gpus=self.gpus, max_retries=RETRIES)(_on_ray)
        waiting, pending = iter(tasks), dict[Any, Task]()
        try:
            while True:
                places = max(1, int(ray.cluster_resources().get("CPU", 1)))  # a cluster may grow
                for task in islice(waiting, 2 * places - len(pending)):
                    pending[remote.remote(work, task)] = task
                if not pending:
                    return
                over, _ = ray.wait(list(pending), num_returns=1, timeout=1.0)
                for reference in over:
                    failure = _result(ray, reference)
                    ended(pending.pop(reference), failure)
                watch([RunningTask(task) for task in list(pending.values())[:places]])  # they begin in their order
        except BaseException as error:
            _cancel(ray, list(pending))
            if isinstance(error, KeyboardInterrupt | Interrupted):
                raise Interrupted(STOPPED) from None
            raise


def _on_ray(work: Work[Task], task: Task) -> str | None:
    work_alone()
    return _interruptible_attempt(work, task)


def _result(ray: Any, reference: Any) -> str | None:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError:  # an error that no run should make
        raise
    except ray.exceptions.RayError:
        return _DIED.format(RETRIES + 1)


def _cancel(ray: Any, references: list[Any]) -> None:
    """Let those under way save themselves, and begin no more; a second Ctrl-C ends them at once."""
    try:
        for reference in references:
            ray.cancel(reference, force=False)
        ray.wait(references, num_returns=len(references)) if references else None
    except KeyboardInterrupt:
        for reference in references:
            ray.cancel(reference, force=True)


def _ray(flag: str = "--engine") -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise CalgpError(f'{flag} ray needs Ray: pip install "calgp[ray]".') from None


ENGINES = ("local", "ray")


def find_engine(
    name: str = "local",
    *,
    jobs: int | None = None,
    address: str | None = None,
    gpus: float = 0.0,
    flag: str = "--engine",
) -> Engine:
    """An engine by its name; `jobs` is how many tasks at a time on this machine: one, or with Ray, one a core.

    `flag` is what messages call the option that names it.
    """
    if name not in ENGINES:
        raise name_error("There is no engine", name, ENGINES)
    if jobs is not None and jobs < 1:
        raise CalgpError(f"Invalid jobs={jobs}: must be at least 1.")
    if not 0 <= gpus < float("inf"):
        raise CalgpError(f"Invalid gpus={gpus}: must be at least 0, such as 1 or 0.25.")
    if name == "ray":
        _ray(flag)
        return Ray(jobs or os.cpu_count() or 1, address, gpus)
    if address is not None or gpus:
        raise CalgpError(f"--address and --gpus are for {flag} ray; leave them out, or add it.")
    return SerialEngine() if jobs in (None, 1) else Processes(jobs)
