"""The thread that owns the model: company changes no answer, the queue has an end, nothing accepted is lost."""

import queue
import threading
import time

import pytest
import torch
from lightning_fabric import Fabric

from calgp.gp import predict
from calgp.runs import shipped_run
from calgp.runs.evaluation import Predictor
from calgp.serve.batching import LOOK, Job, Refused, Worker, model_cost
from calgp.serve.limits import Limits

ROUNDING = 1e-5  # what may differ with the company in a batch: float32 sums in another order


@pytest.fixture(scope="module")
def predictor():
    return Predictor.of(shipped_run(), Fabric(accelerator="cpu", devices=1), None)


@pytest.fixture
def work(predictor):
    """Makes workers, which hear what they do, and closes them."""
    workers = []

    def make(turns: list | None = None, **limits) -> Worker:
        def observe(*turn):
            if turns is not None:
                turns.append(turn)

        cost = model_cost(predictor.model, (1, 28, 28))
        workers.append(Worker(predictor, cost, Limits(**limits), observe=observe))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def asked(digits, *, samples=4, seed=0, seconds=30.0, **options) -> tuple[Job, queue.Queue]:
    heard: queue.Queue = queue.Queue()
    pictures = torch.from_numpy(digits[:, None])
    return Job(pictures, samples, seed, time.monotonic() + seconds, heard.put, **options), heard


def probs(heard: queue.Queue) -> torch.Tensor:
    told = heard.get(timeout=20)
    assert not isinstance(told, Exception), told
    return torch.tensor([answer.probabilities for answer in told.answers])


def test_company_changes_no_answer_and_jobs_of_one_seed_share_turns(work, predictor, digits):
    turns: list = []
    worker = work(turns, wait=0.5, batch=12)
    asking = [(digits[row : row + 1 + row % 3], 3 + row % 4, row % 2) for row in range(12)]
    jobs = [asked(part, samples=samples, seed=seed) for part, samples, seed in asking]
    for job, _ in jobs:
        worker.submit(job)
    for (part, samples, seed), (_, heard) in zip(asking, jobs, strict=True):
        x = torch.from_numpy(part[:, None]).float() / 255
        wanted = predict(predictor.model, x, samples=samples, seed=seed).probs
        torch.testing.assert_close(probs(heard), wanted, rtol=0, atol=ROUNDING)
    worker.close()
    assert sum(images * samples for images, samples, _ in turns) == sum(len(p) * s for p, s, _ in asking)
    assert max(images for images, _, _ in turns) > 6
    assert worker.queued == 0 and worker.backlog == 0


def test_a_batch_is_no_larger_than_its_samples_allow(work, digits):
    turns: list = []
    worker = work(turns, wait=0.5)
    worker.fit = 20
    jobs = [asked(digits[:1], samples=8) for _ in range(6)]
    for job, _ in jobs:
        worker.submit(job)
    for _, heard in jobs:
        probs(heard)
    worker.close()
    assert [(images, samples) for images, samples, _ in turns] == [(2, 8)] * 3


def test_a_long_job_does_not_keep_others_waiting(work, digits):
    worker = work(wait=0)
    worker.fit = 8
    long, long_heard = asked(digits[:1], samples=400)
    worker.submit(long)
    for _ in range(3):
        job, heard = asked(digits[:1], samples=2)
        worker.submit(job)
        probs(heard)
    assert long_heard.empty()
    assert probs(long_heard).shape == (1, 10)


def test_looks_are_at_fixed_samples_whatever_the_company(work, digits):
    worker = work(wait=0.3)
    adaptive, heard = asked(digits[:4], samples=100, error=0.01)
    other, other_heard = asked(digits[:1], samples=13)
    for job in (adaptive, other):
        worker.submit(job)
    told = heard.get(timeout=20).answers
    other_heard.get(timeout=20)
    assert all(answer.samples % LOOK == 0 for answer in told if answer.settled)
    alone, alone_heard = asked(digits[:4], samples=100, error=0.01)
    worker.submit(alone)
    again = alone_heard.get(timeout=20).answers
    assert [answer.samples for answer in again] == [answer.samples for answer in told]


def test_what_is_too_much_is_refused_at_once(work, digits):
    worker = work(queue=3, wait=1.0)
    accepted = [asked(digits[:1]) for _ in range(3)]
    for job, _ in accepted:
        worker.submit(job)
    with pytest.raises(Refused, match="waiting"):
        worker.submit(asked(digits[:1])[0])
    for _, heard in accepted:
        probs(heard)
    job, heard = asked(digits[:5])  # larger than the queue, but alone
    worker.submit(job)
    assert probs(heard).shape == (5, 10)


def test_what_nobody_waits_for_is_let_go(work, digits):
    worker = work(wait=0)
    late, late_heard = asked(digits[:1], seconds=-1.0)
    gone, gone_heard = asked(digits[:1])
    gone.cancelled = True
    for job in (late, gone):
        worker.submit(job)
    assert isinstance(late_heard.get(timeout=20), TimeoutError)
    assert isinstance(gone_heard.get(timeout=20), TimeoutError)
    worker.close()
    assert worker.queued == 0


def test_a_batch_that_fails_takes_nobody_with_it(work, digits, caplog):
    worker = work(wait=0)
    bad, bad_heard = asked(digits[:1])
    bad.pictures = torch.zeros(1, 3, 28, 28, dtype=torch.uint8)  # the model takes one channel
    worker.submit(bad)
    assert isinstance(bad_heard.get(timeout=20), Exception)
    good, good_heard = asked(digits[:1])
    worker.submit(good)
    assert probs(good_heard).shape == (1, 10)


def test_closing_finishes_what_was_accepted(work, digits):
    worker = work(wait=5.0)
    jobs = [asked(digits[:1], samples=20, seed=seed) for seed in range(5)]
    for job, _ in jobs:
        worker.submit(job)
    closing = threading.Thread(target=worker.close)
    closing.start()
    assert all(probs(heard).shape == (1, 10) for _, heard in jobs)
    closing.join(20)
    with pytest.raises(Refused, match="shutting down"):
        worker.submit(asked(digits[:1])[0])
    assert not worker.alive
