"""The narrow waist: a model says what it knows of f at x and what that costs; bound and prediction are written once."""

import functools
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from calgp.errors import CalgpError
from calgp.gp.cholesky import NumericalError
from calgp.gp.likelihoods import Latent, Likelihood
from calgp.gp.noise import Noise, Site, name_sites
from calgp.gp.predictive import Predictive, SampleMoments

Batch = tuple[Tensor, Tensor]  # images and their rows in the data set


class Model(nn.Module, ABC):
    """What a method builds.

    integrate: whether the weights of its last layer are integrated in closed form, in training and in prediction,
        rather than drawn.
    """

    likelihood: Likelihood
    integrate: bool = False

    def stem(self, x: Tensor) -> Tensor:
        """What no sample changes, computed once for all of them."""
        return x

    @abstractmethod
    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        """What the samples change: f at the inputs behind `h`."""

    def forward(self, x: Tensor, noise: Noise | None = None) -> Latent:
        return self.sample(self.stem(x), noise)

    def integrates(self, noise: Noise | None) -> bool:
        """Whether a pass with this noise integrates the last layer: as the noise asks, or as the model is trained."""
        return self.integrate if noise is None or noise.integrate is None else noise.integrate

    @abstractmethod
    def kl(self) -> Float[Tensor, ""]:
        """KL[q ‖ p] over all that is inferred, up to constants."""

    def sites(self) -> dict[str, Site]:
        """Every place where noise is drawn, by name; empty for a network that is the same for all samples."""
        return name_sites(self)


@dataclass(frozen=True)
class MixedLabels:
    """The other labels of images that are mixtures of two, and the share λ of the first labels."""

    y: Int[Tensor, "N"]
    share: Float[Tensor, "N"]


class Bound(nn.Module):
    """The training loss of a model: the negative lower bound per image, in two parts to be added.

    Eq. (6) by (8), (9), (13), (15), (16). It is a module so that data-parallel and compiled training can wrap it.

    >>> import calgp
    >>> bound = calgp.Bound(calgp.load("shipped").model, n=4500)
    >>> nll, kl = bound(torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.long))
    >>> loss = nll + kl  # loss.backward(), and a step of any optimiser

    Args:
        model: what is trained.
        n: images in the training set.
        weights: w_q of each class, for classes that are not equally frequent or important: the likelihood term becomes
            Σ_i w_{y_i} E_q log p(y_i | x_i), as if each image of class q were there w_q times. None means 1.
    """

    weights: Tensor | None

    def __init__(self, model: Model, n: int, weights: Float[Tensor, "Q"] | None = None) -> None:
        super().__init__()
        self.model, self.n = model, n
        self.register_buffer("weights", weights, persistent=False)
        model.sites()

    def forward(
        self, x: Tensor, y: Tensor, noise: Noise | None = None, mixed: MixedLabels | None = None
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """(−(1/m) Σ_k w_{y_k} E_q log p(y_k | x_k), Eq. (9), (15), and KL / n), to be added and minimised.

        Of `mixed` images the likelihood term is λ that of y + (1 − λ) that of the other labels.
        """
        latent = self.model(x, noise)

        def expected(y: Tensor) -> Float[Tensor, "N"]:
            found = self.model.likelihood.expected_log_prob(latent, y, noise)
            return found if self.weights is None else self.weights[y] * found

        terms = expected(y)
        if mixed is not None:
            terms = mixed.share * terms + (1 - mixed.share) * expected(mixed.y)
        return -terms.mean(), self.model.kl() / self.n


Engine = Literal["moments", "samples"]
SAMPLES = 50  # of the paper's Monte Carlo
DRAWS = 256  # quasi-random draws of f in one pass: 98 % of MNIST's probabilities to 1e-3, at a few per cent of its time
FEWEST_DRAWS = 16  # in each of many passes


@dataclass(frozen=True)
class Passes:
    """How a prediction is computed.

    count: passes of the network.
    engine: `samples`, each pass draws all that is random (the paper's Monte Carlo); `moments`, the weights of the last
        layer are integrated in closed form: in a single pass everything else is at its mean, in several it is drawn.

    >>> Passes(50, "samples").count
    50
    """

    count: int
    engine: Engine

    def __post_init__(self) -> None:
        if self.count < 1 or self.engine not in get_args(Engine):
            raise ValueError(f"Invalid {self}: must have passes ≥ 1 and engine moments or samples")

    @staticmethod
    def of(model: Model, count: int | None = None, engine: Engine | None = None) -> "Passes":
        """What was asked for; else one pass of a model with an integrated last layer, 50 samples of any other."""
        if not hasattr(model, "integrate"):  # anybody's module may come here
            raise CalgpError(
                f"Invalid model, {type(model).__name__}: must be a model of calgp, such as gp_classifier gives. Of a "
                "wrapper, such as DataParallel or AveragedModel, give its `module`."
            )
        engine = engine or ("moments" if model.integrate else "samples")
        return Passes((1 if engine == "moments" else SAMPLES) if count is None else count, engine)

    def noise(self, seed: int, first: int, last: int, rows: Tensor) -> Noise:
        """The noise of the passes first … last - 1."""
        passes = torch.arange(first, last, device=rows.device)
        if self.engine == "samples":
            return Noise(seed, passes, rows, integrate=False)
        draws = max(DRAWS // self.count, FEWEST_DRAWS)
        return Noise(seed, passes, rows, mean=self.count == 1, integrate=True, draws=draws)

    def __str__(self) -> str:
        if self.engine == "samples":
            return f"{self.count} sample" + "s" * (self.count > 1)
        return "1 pass" if self.count == 1 else f"{self.count} passes"


SIZE = 100  # of the batches that one tensor of images is split into
MEMORY = (512 * 2**20, 64 * 2**20)  # elsewhere, and on a processor, whose caches like small tensors


def predict(
    model: Model,
    data: Tensor | Iterable[Batch],
    *,
    passes: int | None = None,
    engine: Engine | None = None,
    seed: int = 0,
    memory: int | None = None,
) -> Predictive:
    """Predict images: probabilities and their uncertainty, Eq. (10), in one pass of the network or in several.

    >>> import calgp
    >>> p = calgp.predict(calgp.load("shipped").model, torch.zeros(2, 1, 28, 28))
    >>> p.probs.shape, p.entropy.shape
    (torch.Size([2, 10]), torch.Size([2]))

    Leaves the model and every generator as they were. The same seed gives the same answer for an image, whatever the
    batches. Pixels that are no finite numbers are refused (CalgpError), and so are images whose numbers overflow on
    their way (NumericalError).

    Args:
        model: what was trained.
        data: one tensor of images (their rows are 0, 1, …), or batches of (images, rows in the data set).
        passes: of the network; None: one of a model with an integrated last layer, 50 of any other.
        engine: `moments`, weights of the last layer are integrated in closed form: with one pass, masks of the filters
            are at their mean; with more, they are drawn. `samples`, each pass draws everything (the paper's Monte
            Carlo; fewer passes give the average over the first of the same draws). None: as the model was trained.
        seed: of the masks.
        memory: bytes that activations may take (None: 64 MB on a processor, 512 MB elsewhere); it decides how much is
            computed at a time, never the result.
    """
    if isinstance(data, Tensor):
        _check_images(model, data)
    elif not isinstance(data, Iterable) or isinstance(data, str | bytes) or hasattr(data, "__array__"):
        raise CalgpError(
            f"Invalid images, {type(data).__name__}: must be {IMAGES}, or batches of these and their rows."
        )
    return Predictive.cat(predict_batches(model, data, passes=passes, engine=engine, seed=seed, memory=memory))


def predict_batches(
    model: Model,
    data: Tensor | Iterable[Batch],
    *,
    passes: int | None = None,
    engine: Engine | None = None,
    seed: int = 0,
    memory: int | None = None,
) -> Iterator[Predictive]:
    """`predict`, one batch at a time: for more predictions than fit in memory.

    >>> import calgp
    >>> model, x = calgp.load("shipped").model, torch.zeros(5, 1, 28, 28)
    >>> [len(p.labels) for p in predict_batches(model, ((x[rows], rows) for rows in torch.arange(5).split(2)))]
    [2, 2, 1]
    """
    if not 0 <= seed < 2**63:
        raise ValueError(f"Invalid {seed=}: must be from 0 to 2^63 - 1")
    how = Passes.of(model, passes, engine)
    if isinstance(data, Tensor):
        data = zip(data.split(SIZE), torch.arange(len(data), device=data.device).split(SIZE), strict=True)
    for batch in data:
        x, rows = _check_batch(model, batch)
        if not x.isfinite().all():
            raise CalgpError(
                f"The image of row {_first(~x.isfinite(), rows)} has pixels that are no finite numbers; mend it or "
                "leave it out."
            )
        with evaluating(model), torch.no_grad(), _of_its_shape(x):
            predictive = Predictive.cat(_predict_batch(model, x, rows, how, seed, memory))
        if predictive.log_probs.isnan().any():
            raise NumericalError(
                f"the probabilities of row {_first(predictive.log_probs.isnan(), rows)} are no numbers; the pixels of "
                f"its batch go from {x.min():g} to {x.max():g}, and images have pixels from 0 to 1"
            )
        yield predictive  # outside: the caller goes on with gradients, and with the model as it was


IMAGES = "one tensor of images [N, channels, height, width], floats from 0 to 1"


def _check_batch(model: Model, batch: object) -> Batch:
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not all(isinstance(each, Tensor) for each in batch):
        raise CalgpError(f"Invalid batch, {type(batch).__name__}: must be images and their rows, two tensors.")
    x, rows = batch
    _check_images(model, x)
    return x, rows


def _check_images(model: Model, x: Tensor) -> None:
    wanted = next((p.dtype for p in model.parameters() if p.is_floating_point()), x.dtype)
    if x.ndim < 2 or not len(x):
        raise CalgpError(f"Invalid images of shape {list(x.shape)}: must be {IMAGES}, at least one.")
    if x.dtype != wanted:
        hint = "divide 8-bit pixels by 255" if not x.is_floating_point() else f"x.to({wanted}) makes them"
        raise CalgpError(f"Invalid images of {x.dtype}: must be of {wanted}, as the model is; {hint}.")


@contextmanager
def _of_its_shape(x: Tensor) -> Iterator[None]:
    """Turns torch's complaints about shapes into one sentence; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:200]
        if isinstance(error, torch.cuda.OutOfMemoryError) or not any(
            word in reason for word in ("shape", "size", "channels", "elements")
        ):
            raise
        raise CalgpError(f"The model cannot take images of shape {list(x.shape)}: {reason}.") from error


def _first(wrong: Tensor, rows: Tensor) -> int:
    """The row of the first image for which something is wrong."""
    return int(rows[wrong.flatten(1).any(1).nonzero()[0, 0]])


def _predict_batch(
    model: Model, x: Tensor, rows: Tensor, how: Passes, seed: int, memory: int | None
) -> Iterator[Predictive]:
    """A few rows at a time with all of their samples; if these do not fit, a few samples at a time.

    Samples are consumed where they are born, so that memory does not grow with their number. Where rows are not
    independent (`mixes_rows`), neither rows nor samples may be split or joined: the batch as it is, sample by sample.
    """
    h = model.stem(x)
    if mixes_rows(model):
        samples = how.count if model.sites() or sample_cost(model, h, how)[1] else 1
        size, chunk = len(x), 1
    else:
        one, random = sample_cost(model, h[:1], how)
        samples = how.count if random else 1
        fit = (MEMORY[x.device.type == "cpu"] if memory is None else memory) // one  # samples of a row
        size = min(max(fit // samples, 1), len(x))
        chunk = max(fit // size, 1)
    for h_part, rows_part in zip(h.split(size), rows.split(size), strict=True):
        chunks = ((first, min(first + chunk, samples)) for first in range(0, samples, chunk))
        parts = (SampleMoments.of(draw(model, h_part, how.noise(seed, *part, rows_part))) for part in chunks)
        yield functools.reduce(operator.add, parts).predictive()


def mixes_rows(model: nn.Module) -> bool:
    """Whether the prediction of an image depends on its batch: batch norm without running statistics.

    It then takes the moments of the batch, as the authors' code does at test time, with batches of 100.

    >>> mixes_rows(nn.BatchNorm1d(2)), mixes_rows(nn.BatchNorm1d(2, track_running_stats=False))
    (False, True)
    """
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None for m in model.modules())


def draw(model: Model, h: Tensor, noise: Noise) -> Float[Tensor, "S N Q"]:
    """log p_s(y | x) of each sample, and of each draw of f in it, at the images behind `h`."""
    return model.likelihood.log_probs(model.sample(h, noise), noise)


def sample_cost(model: Model, h: Tensor, how: Passes) -> tuple[int, bool]:
    """Bytes that one sample of the images behind `h` takes, and whether samples differ at all."""
    rows = torch.zeros(len(h), dtype=torch.int64, device=h.device)
    if model.sites():
        return _footprint(model, lambda: draw(model, h, how.noise(0, 0, 1, rows))), how.count > 1
    # the network is the same for all samples; what grows with them are the draws of a Gaussian latent, if any
    one, two = (draw(model, h, how.noise(0, 0, count, rows)) for count in (1, 2))
    return 16 * one.numel() * one.element_size(), len(two) > len(one)  # in double precision, with what they are made of


def _footprint(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes that one sample of one row takes at its peak: about four times the largest tensor that a layer gives."""
    sizes = [1]

    def record(output: Tensor) -> None:
        sizes.append(output.numel() * output.element_size())

    with outputs_seen(set(model.modules()), record):
        record(run())
    return 4 * max(sizes)


@contextmanager
def outputs_seen(modules: Collection[nn.Module], see: Callable[[Tensor], None]) -> Iterator[None]:
    """While it lasts, `see` is given the tensors that these modules return in this thread.

    >>> layer, seen = nn.Linear(2, 3), []
    >>> with outputs_seen([layer], seen.append):
    ...     y = nn.Sequential(layer, nn.ReLU())(torch.zeros(4, 2))
    >>> [each.shape for each in seen]
    [torch.Size([4, 3])]
    """
    here = threading.get_ident()

    def record(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and module in modules and threading.get_ident() == here:
            see(output)

    # for all modules there are: hooks of these modules would be written into them, while other threads use them
    with _GUARD:
        handle = register_module_forward_hook(record)
    try:
        yield
    finally:
        with _GUARD:
            handle.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Batch norm uses its running statistics and leaves them alone; afterwards every module is as it was.

    Threads may overlap: a module that was training does so again when the last of them has left. A model that is in
    evaluation mode, as loaded and trained ones are, is not written to.
    """
    with _GUARD:
        modules = [module for module in model.modules() if module.training or module in _EVALUATED]
        for module in modules:
            count, training = _EVALUATED.get(module, (0, module.training))
            _EVALUATED[module] = count + 1, training
        if any(module.training for module in modules):
            model.eval()
    try:
        yield
    finally:
        with _GUARD:
            for module in modules:
                count, training = _EVALUATED.pop(module)
                if count > 1:
                    _EVALUATED[module] = count - 1, training
                else:
                    module.training = training


_GUARD = threading.RLock()
_EVALUATED: dict[nn.Module, tuple[int, bool]] = {}  # how many threads evaluate a module, and its mode before
