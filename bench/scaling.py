"""How do time and memory grow with images, samples, width, frequencies, depth and classes?"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.measure import Curve, exponent, median_seconds
from bench.prediction import masked_model
from bench.step import MNIST, calgp_step, examples
from calgp.gp import DeepGP, Noise, RandomFeatureGP, name_sites, predict

BATCH = 200
DENSE = 4096  # the widest dense Ω that is tried here


def run(quick: bool) -> list[Curve]:
    step = 2 if quick else 1
    return [*prediction_curves(step), *training_curves(step), *head_curves(step), *storage_curves()]


def prediction_curves(step: int) -> list[Curve]:
    """Whole predictions, as the images and the samples grow."""
    model, (x, _) = masked_model("channel"), examples(MNIST, 800)
    images, samples = [50, 100, 200, 400, 800][::step], [1, 4, 16, 64, 256][::step]
    by_images = [median_seconds(lambda n=n: predict(model, x[:n], passes=20), 3) for n in images]
    by_samples = [median_seconds(lambda s=s: predict(model, x[:50], passes=s), 3) for s in samples]
    return [
        time_curve("images n", "prediction, 20 samples, LeNet", images, by_images),
        time_curve("samples S", "prediction, 50 images, LeNet", samples, by_samples),
    ]


def training_curves(step: int) -> list[Curve]:
    """Training steps, as the batch grows; an epoch of n images has n / batch of them."""
    batches = [25, 100, 400, 1600][::step]
    y = [median_seconds(calgp_step("cnn-gp-sorf-paper", "lenet", MNIST, batch), 3) for batch in batches]
    return [time_curve("batch", "training step, LeNet, SORF", batches, y)]


def head_curves(step: int) -> list[Curve]:
    """GP heads alone: time of forward and backward, and bytes kept in between, weights included."""
    sorf, dense = ("SORF", "sorf"), ("dense Ω, fixed", "gaussian")
    curves = []
    for name, kind in (sorf, dense):
        widths = [w for w in [64, 256, 1024, 4096, 16_384][::step] if kind == "sorf" or w <= DENSE]
        curves += both(
            "features d = N_RF", name, widths, lambda d, k=kind: (RandomFeatureGP(d, 10, frequencies=k), d, 10)
        )
    for name, kind in (sorf, dense):
        counts = [n for n in [512, 2048, 8192, 32_768][::step] if kind == "sorf" or n <= 8192]
        curves += both(
            "frequencies N_RF, d = 512",
            name,
            counts,
            lambda n, k=kind: (RandomFeatureGP(512, 10, n_rf=n, frequencies=k), 512, 10),
        )
    curves += both("GP layers", "SORF, d = 1024, width 64", [1, 2, 4, 8][::step], lambda n: (deep(n), 1024, 10))
    classes = [10, 100, 1000, 10_000][::step]
    return curves + both("classes Q", "SORF, d = 1024", classes, lambda q: (RandomFeatureGP(1024, q), 1024, q))


def deep(depth: int, d: int = 1024, width: int = 64) -> DeepGP:
    inputs, outputs = [d] + [d + width] * (depth - 1), [width] * (depth - 1) + [10]
    return DeepGP([RandomFeatureGP(i, o) for i, o in zip(inputs, outputs, strict=True)])


Head = tuple[RandomFeatureGP | DeepGP, int, int]  # with its width and its classes


def both(question: str, name: str, x: list[int], make: Callable[[int], Head]) -> list[Curve]:
    seconds, kept = zip(*(head_cost(*make(size)) for size in x), strict=True)
    megabytes = [size / 2**20 for size in kept]
    memory = Curve(question, "memory", name, list(map(float, x)), megabytes, "MB", exponent(x, megabytes))
    return [time_curve(question, name, x, list(seconds)), memory]


def head_cost(head: RandomFeatureGP | DeepGP, d: int, classes: int) -> tuple[float, float]:
    """Seconds of forward and backward, to the input and the weights; bytes that the backward pass needs."""
    torch.manual_seed(0)
    name_sites(head)
    c, y = torch.randn(BATCH, d).requires_grad_(), torch.randint(classes, (BATCH,))
    noise = Noise(0, torch.arange(1), torch.arange(BATCH))
    wanted: list[Tensor] = [c, *(p for p in head.parameters() if p.requires_grad)]

    def loss() -> Tensor:
        return F.cross_entropy(head(c, noise), y)

    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss()  # noqa: F841 held, so that no address is given to a second tensor
    return median_seconds(lambda: torch.autograd.grad(loss(), wanted)), float(sum(kept.values()))


def storage_curves() -> list[Curve]:
    """Bytes that Ω takes on the disk and in memory."""
    widths = [64, 256, 1024, 4096]
    curves = []
    for name, kind in (("SORF", "sorf"), ("dense Ω, fixed", "gaussian")):
        heads = [RandomFeatureGP(w, 10, frequencies=kind) for w in widths]
        y = [sum(b.numel() * b.element_size() for b in head.frequencies.buffers()) / 2**20 for head in heads]
        x = list(map(float, widths))
        curves.append(Curve("features d = N_RF", "storage of Ω", name, x, y, "MB", exponent(x, y)))
    return curves


def time_curve(question: str, name: str, x: list[int], seconds: list[float]) -> Curve:
    return Curve(question, "time", name, list(map(float, x)), [1e3 * s for s in seconds], "ms", exponent(x, seconds))
