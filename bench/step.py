"""How fast is a training step? Against the same model written plainly, the plain CNN, and GPyTorch's heads."""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from bench import gpytorch_heads, straightforward
from bench.measure import Row, compare
from calgp.gp import Bound, Model, Noise
from calgp.methods import METHODS
from calgp.nets import BACKBONES, Task
from calgp.runs import Run
from calgp.training.loop import make_optimiser

QUESTION = "Training step"
HEAD = "Head alone, forward + backward"
N = 60_000
MNIST, CIFAR = Task(1, 28, 28, 10), Task(3, 32, 32, 10)


def calgp_step(method: str, backbone: str, task: Task, batch: int, **options: object) -> Callable[[], object]:
    """A step as `calgp train` does it: keyed masks, the fused optimiser."""
    torch.manual_seed(0)
    chosen = dataclasses.replace(METHODS[method], **options)  # type: ignore[arg-type]
    model = chosen.build(task, BACKBONES[backbone])
    run = Run(chosen, BACKBONES[backbone], source="mnist")
    return model_step(model, make_optimiser(run, model), task, batch)


def with_torchs_norm() -> Callable[[], object]:
    torch.manual_seed(0)
    run = Run(METHODS["cnn-gp-sorf-paper"], BACKBONES["lenet-cifar"], source="cifar10")
    model = run.method.build(CIFAR, run.backbone)
    model.features.response_norm = nn.LocalResponseNorm(9, 0.001, 0.75, 1.0)  # type: ignore[union-attr]
    return model_step(model, make_optimiser(run, model), CIFAR, 100)


def model_step(model: Model, optimiser: torch.optim.Optimizer, task: Task, batch: int) -> Callable[[], object]:
    bound, (x, y), step = Bound(model, N), examples(task, batch), [0]

    def run() -> None:
        step[0] += 1
        optimiser.zero_grad(set_to_none=True)
        nll, kl = bound(x, y, Noise(-1, torch.tensor([step[0]]), torch.arange(batch)))
        (nll + kl).backward()
        optimiser.step()

    return run


def plain_step(model: nn.Module, task: Task, batch: int) -> Callable[[], object]:
    optimiser, (x, y) = torch.optim.Adam(model.parameters()), examples(task, batch)
    return lambda: straightforward.training_step(model, optimiser, x, y, N)


def examples(task: Task, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(batch, task.channels, task.height, task.width, generator=generator)
    return x, torch.randint(task.classes, (batch,), generator=generator)


def plain_lenet(*, sorf: bool) -> nn.Module:
    torch.manual_seed(0)
    return straightforward.Model(straightforward.LeNet(), straightforward.GP(4096, 4096, 10, sorf=sorf))


def plain_deep_lenet() -> nn.Module:
    torch.manual_seed(0)
    layers = [straightforward.GP(4096, 4096, 64, sorf=True), straightforward.GP(4160, 4160, 10, sorf=True)]
    return straightforward.Model(straightforward.LeNet(), straightforward.DeepGP(layers))


def plain_resnet(*, sorf: bool) -> nn.Module:
    torch.manual_seed(0)
    return straightforward.Model(straightforward.ResNet(), straightforward.GP(64, 64, 10, sorf=sorf))


def run(quick: bool) -> list[Row]:
    plain, cnn = "the same, plain PyTorch", "CNN with its fully connected layers"
    svdkl, svgp = "GPyTorch SVDKL, 64 features, grid 64", "GPyTorch SVGP, 200 inducing points"
    rows = []
    for batch in (100, 1000):
        others = {plain: plain_step(plain_lenet(sorf=True), MNIST, batch)}
        others[cnn] = calgp_step("cnn", "lenet", MNIST, batch)
        reach = {plain: 2.0}
        if batch == 100:
            others |= {svdkl: gpytorch_heads.svdkl_step(*examples(MNIST, batch), N)}
            others |= {svgp: gpytorch_heads.svgp_step(*examples(MNIST, batch), N)}
            reach |= {svdkl: 3.0, svgp: 8.0}
        ours = ("CNN+GP(SORF)", calgp_step("cnn-gp-sorf-paper", "lenet", MNIST, batch))
        rows += compare(QUESTION, f"LeNet, batch {batch:,}", ours, others, reach=reach, rounds=5)
    ours = ("CNN+GP(RF)", calgp_step("cnn-gp-rf-paper", "lenet", MNIST, 100))
    note = "Ω of 16.8 million weights"
    rows += compare(
        QUESTION,
        "LeNet, batch 100",
        ours,
        {plain: plain_step(plain_lenet(sorf=False), MNIST, 100)},
        rounds=5,
        note=note,
    )
    ours = ("CNN+DGP, 2 layers", calgp_step("cnn-dgp", "lenet", MNIST, 100))
    rows += compare(QUESTION, "LeNet, batch 100", ours, {plain: plain_step(plain_deep_lenet(), MNIST, 100)}, rounds=5)
    ours = ("CNN+GP(SORF)", calgp_step("cnn-gp-sorf-paper", "lenet-cifar", CIFAR, 100))
    theirs = {"the same with torch's LocalResponseNorm": with_torchs_norm()}
    rows += compare(QUESTION, "LeNet of CIFAR-10, batch 100", ours, theirs, rounds=5)
    for name, method, sorf in (("SORF", "cnn-gp-sorf-paper", True), ("RF", "cnn-gp-rf-paper", False)):
        ours = (f"CNN+GP({name})", calgp_step(method, "resnet", CIFAR, 100))
        others = {plain: plain_step(plain_resnet(sorf=sorf), CIFAR, 100)}
        if sorf:
            others[cnn] = calgp_step("cnn", "resnet", CIFAR, 100)
        rows += compare(QUESTION, "ResNet(5), batch 100", ours, others, rounds=5)
    return rows + integrated_steps() + heads()


def integrated_steps() -> list[Row]:
    """The masks of W integrated against the same model with sampled masks."""
    rows, sampled = [], "the same, masks of W sampled"
    for network, name, (channels, side) in (("lenet", "LeNet", (1, 28)), ("resnet", "ResNet(5)", (3, 32))):
        for classes in (10, 100):
            task = Task(channels, side, side, classes)
            ours = ("CNN+GP(SORF), integrated", calgp_step("cnn-gp-sorf", network, task, 100))
            others = {sampled: calgp_step("cnn-gp-sorf", network, task, 100, integrate=False)}
            case = f"{name}, batch 100, {classes} classes"
            rows += compare(QUESTION, case, ours, others, reach={sampled: 1 / 1.15}, rounds=5)
    return rows


def heads() -> list[Row]:
    """GP(SORF) against the fully connected layers 4096-1024-10 that it replaces."""
    torch.manual_seed(0)
    batch = 1000
    c = torch.rand(batch, 4096).requires_grad_()
    y = torch.randint(10, (batch,))
    gp = METHODS["cnn-gp-sorf-paper"].build(MNIST, BACKBONES["lenet"])
    gp.sites()
    head, connected = gp.gp, nn.Sequential(nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10))
    noise = Noise(0, torch.arange(1), torch.arange(batch))

    def both(module: nn.Module, call: Callable[[], torch.Tensor]) -> Callable[[], object]:
        wanted = [c, *(p for p in module.parameters() if p.requires_grad)]
        return lambda: torch.autograd.grad(F.cross_entropy(call(), y), wanted)

    sizes = [sum(p.numel() for p in module.parameters() if p.requires_grad) for module in (head, connected)]
    return compare(
        HEAD,
        f"batch {batch:,}",
        ("GP(SORF)", both(head, lambda: head(c, noise))),
        {"fully connected 4096-1024-10": both(connected, lambda: connected(c))},
        reach={"fully connected 4096-1024-10": 1 / 0.7},
        note=f"parameters: {sizes[0]:,} of {sizes[1]:,}, {sizes[0] / sizes[1]:.2%}",
    )
