"""The training loop: minimise the bound, one step at a time."""

import functools
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from calgp.data import Images
from calgp.data.images import to_unit_interval
from calgp.data.order import UNIFORM, Order
from calgp.gp import Bound, Model, Noise, NumericalError
from calgp.nets import program_features
from calgp.run import Run
from calgp.runs.failures import PATIENCE, BufferSnapshot, non_finite
from calgp.runs.ranks import gathered, share, summed, wrap_rank_errors
from calgp.training.augmentation import augmented, mixed_up
from calgp.training.muon import Muon

ROWS_SHOWN = 8


@dataclass(frozen=True)
class Step:
    """One optimiser step, done or skipped. Both parts of the bound are still on the device."""

    step: int
    steps: int
    nll: Tensor
    kl: Tensor
    learning_rate: float
    skipped: str | None = None  # why the step changed nothing
    stage: str | None = None  # what is done before the first step, of a pretrained network: features, head


def fit(
    bound: Bound,
    optimiser: torch.optim.Optimizer,
    images: Images,
    run: Run,
    *,
    fabric: Fabric,
    first: int = 0,
    failed: int = 0,
    accumulate: int = 1,
) -> Iterator[Step]:
    """Minimise the bound over the images, a step each time it is asked for the next: Adam on Eq. (6) by (8), (9).

    Order, masks and augmentation are functions of (seed, step), so that starting at step `first` is the same as coming
    from 0. A step whose numbers fail (a loss or a gradient that is not finite, a covariance without a factor) is
    skipped: it changes nothing. After PATIENCE of them in a row, counted from `failed`, NumericalError names the last.

    A batch is that of all ranks: each takes its part of it, and that in `accumulate` parts, one after the other. The
    gradient is the same but for rounding, and for batch norm, which has the moments of a part.
    """
    steps, buffers = run.total_steps(len(images)), BufferSnapshot(bound, fabric)
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    scaled = getattr(fabric.strategy.precision, "scaler", None) is not None  # 16-mixed
    for step, (index, mine, x) in enumerate(_batches(images, run, fabric, first, steps), first):
        held, count = len(share(fabric, index)), min(accumulate, len(mine))
        parts = list(zip(mine.tensor_split(count), x.tensor_split(count), strict=True))
        rate = run.learning_rate_at(step, steps)
        for group in optimiser.param_groups:
            group["lr"] = rate * group.get("share", 1.0)
        optimiser.zero_grad(set_to_none=True)
        buffers.save()
        nll, kl, why = _differentiate(bound, images, run, fabric, step, parts, len(index) if held else 0)
        if why is None:
            why = non_finite(bound.model, parameters, nll, kl, nll + run.kl_weight * kl)
        if why is None and run.clip is not None:
            fabric.clip_gradients(bound, optimiser, max_norm=run.clip, error_if_nonfinite=False)
        if why is None or scaled:  # a scaler skips such a step itself, and learns from it to scale less
            optimiser.step()
        buffers.accept(held / len(index)) if why is None else buffers.restore()
        failed = 0 if why is None else failed + 1
        if failed >= min(PATIENCE, -(-steps // 2)):
            rows = ", ".join(map(str, images.rows[index][:ROWS_SHOWN].tolist())) + ", …" * (len(index) > ROWS_SHOWN)
            raise NumericalError(
                f"step {step + 1} failed, as did the {failed - 1} before it: {why}; its images were rows {rows} of "
                f"{run.source}"
            )
        yield Step(step + 1, steps, nll, kl, rate, why)


def _batches(
    images: Images, run: Run, fabric: Fabric, first: int, steps: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each step: the places of its images, those of this rank, and the bytes of these."""
    whole: deque[Tensor] = deque()  # the batches of all ranks, of which this one's share has been asked for

    def shares() -> Iterator[Tensor]:
        for step in range(first, steps):
            whole.append(order(len(images), run.batch_size, step, run.seed, images.order))
            mine = share(fabric, whole[-1])
            yield mine if len(mine) else whole[-1][:1]  # an image that counts 0

    for mine, x in wrap_rank_errors(fabric, images.read(shares())):
        yield whole.popleft(), mine, x


def _differentiate(
    bound: Bound,
    images: Images,
    run: Run,
    fabric: Fabric,
    step: int,
    parts: Sequence[tuple[Tensor, Tensor]],
    batch: int,
) -> tuple[Tensor, Tensor, str | None]:
    """The two parts of the bound on the batch of all ranks, whose gradients are then in place; or why there are none.

    DDP averages the gradients of the ranks: the likelihood term of m_j images of `batch` counts ranks · m_j / batch,
    the KL term once in all parts together. `parts` are places among the images, and their bytes; `batch` is 0 for a
    rank that has no image of its own.
    """
    nll, kl, loss, why = torch.zeros(()), torch.full((), math.nan), None, None
    try:
        for place, (index, pixels) in enumerate(parts, start=1):
            x, y = fabric.to_device((to_unit_interval(pixels), images.y[index]))
            rows = images.rows[index].to(x.device)
            epoch = step // -(-len(images) // run.batch_size)
            x = augmented(x, run.augment, crop=run.crop or 0, seed=run.seed, step=step, epoch=epoch, rows=rows)
            mixed = None
            if "mixup" in run.augment:
                x, mixed = mixed_up(x, y, seed=run.seed, step=step, rows=rows)
            last = place == len(parts)
            with fabric.no_backward_sync(bound, enabled=fabric.world_size > 1 and not last):  # type: ignore[arg-type]
                part, kl = bound(x, y, training_noise(run, step, rows), mixed)
                weighted = part * (fabric.world_size * len(index) / batch if batch else 0.0)
                loss = weighted + run.kl_weight / len(parts) * kl
                nll = nll.to(part) + weighted.detach()
                if not last:
                    fabric.backward(loss)
    except NumericalError as error:
        why = str(error)
    if fabric.world_size > 1:  # before the pass in which all ranks wait for each other
        both = torch.stack([nll.double() / fabric.world_size, torch.tensor(float(why is not None)).to(nll.device)])
        both = summed(fabric, both)
        nll, failures = both[0].to(kl), both[1]
        why = next(each for each in gathered(fabric, why) if each) if failures > 0 else None
    if why is not None or loss is None:
        return torch.full((), math.nan), torch.full((), math.nan), why
    fabric.backward(loss)
    return nll.detach(), kl.detach(), None


def order(n: int, batch_size: int, step: int, seed: int, kind: Order = UNIFORM) -> Tensor:
    """Which images step `step` sees: a new shuffle each epoch, the last batch of an epoch as large as what is left."""
    epoch, batch = divmod(step, -(-n // batch_size))
    return _shuffle(n, seed, epoch, kind)[batch * batch_size : (batch + 1) * batch_size]


@functools.lru_cache(maxsize=1)
def _shuffle(n: int, seed: int, epoch: int, kind: Order) -> Tensor:
    return kind.shuffle(n, torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63))


def training_noise(run: Run, step: int, rows: Tensor) -> Noise:
    """The masks of a step. Training has the negative seeds, so that prediction never meets the same masks."""
    samples = torch.arange(step * run.mc_samples, (step + 1) * run.mc_samples, device=rows.device)
    return Noise(-1 - run.seed, samples, rows)


def make_optimiser(run: Run, model: Model) -> torch.optim.Optimizer:
    """The run's optimiser; one fused kernel for all parameters, where torch has it."""
    groups = _groups(model)
    if run.optimiser == "sgd":
        return torch.optim.SGD(groups, lr=run.learning_rate, momentum=0.9, nesterov=True)
    if run.optimiser == "muon":
        muon = Muon(groups, lr=run.learning_rate)
        muon.register_step_pre_hook(remove_radial_gradients)
        return muon
    return torch.optim.Adam(groups, lr=run.learning_rate, fused=True)


@torch.no_grad()
def remove_radial_gradients(optimiser: torch.optim.Optimizer, *_: object) -> None:
    """Remove from the gradient of filters W the part along W: batch norm undoes their length, and f is the same.

    It is the gradient of the KL alone, which falls with the length. Orthogonalised with the rest, it would shrink the
    small singular values of W: KL / n matters with few images, and most when these are fitted.
    """
    for weight in (each for group in optimiser.param_groups for each in group["params"]):
        if weight.ndim == 4 and weight.grad is not None:  # g ← g − (⟨g, W⟩ / ‖W‖²) W
            share = (weight.grad * weight).sum() / weight.square().sum().clamp_min(1e-12)
            weight.grad.sub_(share * weight)


def _groups(model: Model) -> list[dict[str, list[nn.Parameter] | float]]:
    """Parameters in their order, those beside each other with the same share of the learning rate together."""
    shares: dict[int, float] = {}
    head = 1.0
    for network in program_features(model):
        shares |= {id(each): share for each, share in network.rates().items()}
        head = network.spec.head_rate
    trained = [(each, shares.get(id(each), head)) for each in model.parameters() if each.requires_grad]
    return [
        {"params": [each for each, _ in group], "share": share}
        for share, group in itertools.groupby(trained, key=lambda pair: pair[1])
    ]
