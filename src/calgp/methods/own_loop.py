"""`gp_classifier`: anybody's network with a Gaussian process on top, as a module for one's own training loop."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from calgp.errors import CalgpError, name_error
from calgp.gp import Latent, Model, Noise, Posterior, evaluating
from calgp.json_values import Json
from calgp.methods import METHODS
from calgp.methods.base import Method
from calgp.methods.cnn_gp import CnnGpModel, RandomFeatures
from calgp.nets import Backbone, Task, Wrapped, WrappedFeatures
from calgp.nets.wrap.backbone import check_plain
from calgp.nets.wrap.sites import LAYERS
from calgp.options import find_option

SIDES = (28, 32, 48, 64, 96, 112, 128, 160, 192, 224, 240, 256, 288, 299, 320, 336, 384, 448, 512)
NETWORK_OPTIONS = ("features", "mask", "unmasked", "mask_first", "mean", "std")  # of Wrapped


def gp_classifier(
    network: nn.Module | Backbone,
    *,
    classes: int,
    freeze: bool = False,
    method: str | Method = "cnn-gp-sorf",
    image_shape: Sequence[int] | None = None,
    seed: int = 0,
    **options: Any,
) -> "GPNetwork":
    """A network whose classifier is a Gaussian process: an `nn.Module` for your own loop.

    The network keeps its weights and loses its last linear layer, if it ends with one; it is copied, not changed.

    >>> import torch, calgp
    >>> network = nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 12 * 12, 26))
    >>> x, y = torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 10
    >>> net = calgp.gp_classifier(network, classes=10, n_rf=256)
    >>> optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
    >>> for _ in range(2):
    ...     loss = net.loss(x, y, n=len(x))
    ...     optimiser.zero_grad()
    ...     loss.backward()
    ...     optimiser.step()
    >>> calgp.predict(net, x).probs.shape
    torch.Size([64, 10])

    Args:
        network: a module from images to logits or features; or a backbone, such as `calgp.wrap(network, …)`.
        classes: how many there are.
        freeze: train the head alone. The network has no masks then, runs without gradients, and its batch norm keeps
            its statistics.
        method: cnn-gp-sorf, cnn-gp-rf, cnn-dgp or cnn-gp-mf, or a value of such a method with other options.
        image_shape: (channels, height, width); None: as the network says, or found by trial.
        seed: of Ω and of the first weights.
        options: what differs from the method: n_rf=1024, kernel="rbf", keep=0.7, … The lengthscale is taken from the
            features of the first batch (option `scale`), or by `start`. And of `calgp.wrap`: features, mask, unmasked,
            mask_first, mean, std.
    """
    of_network = {name: options.pop(name) for name in NETWORK_OPTIONS if name in options}
    chosen = _method(method, options)
    if isinstance(network, nn.Module):
        check_plain(network)
        shape = find_image_shape(network) if image_shape is None else tuple(image_shape)
        layers = [each for each in network.modules() if isinstance(each, LAYERS)]
        masked = not freeze and len(layers) > 2  # the first has no mask, and the last is the old classifier
        of_network.setdefault("mask", "all" if masked else "none")
        network = _Given(network, Wrapped("given", freeze=freeze, **of_network))
    elif freeze or of_network or image_shape is None:
        raise CalgpError(
            "A backbone has its own options, as calgp.wrap(network, freeze=True, mask='none'), and needs the shape of "
            "an image, such as image_shape=(3, 224, 224)."
        )
    else:
        shape = tuple(image_shape)
    if classes < 2 or len(shape) != 3:
        raise CalgpError(
            f"Invalid classes={classes} or image_shape={shape}: must be at least 2, and (channels, height, width)."
        )
    model = chosen.build(Task(*shape, classes=classes), network, generator=torch.Generator().manual_seed(seed))
    return GPNetwork(model, chosen, classes)


class GPNetwork(Model):
    """What `gp_classifier` makes: `loss` trains it, `calgp.predict` predicts with it.

    `state_dict` has all of it, also the lengthscale that was taken from the features.
    """

    started: Tensor

    def __init__(self, model: CnnGpModel, method: RandomFeatures, classes: int) -> None:
        super().__init__()
        self.model, self.method, self.classes = model, method, classes
        self.likelihood, self.integrate = model.likelihood, model.integrate
        self.register_buffer("started", torch.tensor(False))
        self.sites()

    def loss(self, x: Tensor, y: Tensor, *, n: int) -> Float[Tensor, ""]:
        """What to minimise: the negative bound per datum, −(1/m) Σ E log p(y | x) + KL / n.

        Args:
            x, y: a batch of images and labels.
            n: images in the training set, by which the KL is shared.
        """
        return sum(self.bound(x, y, n=n), torch.zeros((), device=x.device))

    def bound(self, x: Tensor, y: Tensor, *, n: int) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """The two parts of `loss`: of the data, and of the KL."""
        if n < 1:
            raise CalgpError(f"Invalid n={n}: must be the number of training images, such as n=len(train).")
        if not self.started:
            self.start(x)
            self._check_labels(x, y)
        return -self.likelihood.expected_log_prob(self(x), y).mean(), self.kl() / n

    @torch.no_grad()
    def start(self, data: Tensor | Iterable[Any]) -> None:
        """Take the lengthscale from the features of some training images: a tensor, or the first batch of a loader.

        `loss` does it with the first batch that it sees, unless it was done before or the method has a lengthscale.
        """
        self.started.fill_(True)
        if self.method.lengthscale is not None or self.method.scale is None:
            return
        x = data if isinstance(data, Tensor) else next(iter(data))
        x = x if isinstance(x, Tensor) else x[0]
        like = next(self.parameters())
        rows = torch.arange(len(x), device=like.device)
        noise = Noise(0, torch.zeros_like(rows[:1]), rows, mean=True)
        with evaluating(self):
            self.model.gp.scale_to(self.model.features(self.stem(x.to(like)), noise), noise, self.method.scale)

    def stem(self, x: Tensor) -> Tensor:
        return self.model.stem(x)

    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        return self.model.sample(h, noise)

    def kl(self) -> Float[Tensor, ""]:
        return self.model.kl()

    def _check_labels(self, x: Tensor, y: Tensor) -> None:
        if y.shape != x.shape[:1] or y.is_floating_point() or int(y.amin()) < 0 or int(y.amax()) >= self.classes:
            raise CalgpError(
                f"Labels must be whole numbers 0 … {self.classes - 1}, one for each of {len(x)} images; there are "
                f"{list(y.shape)} {y.dtype} from {y.amin().item():g} to {y.amax().item():g}."
            )


@dataclass(frozen=True)
class _Given(Backbone):
    """A network that needs no name, since no run folder will refer to it."""

    network: nn.Module
    spec: Wrapped

    @property
    def hidden(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ()

    def build(self, task: Task, posterior: Posterior, *, generator: torch.Generator | None = None) -> WrappedFeatures:
        return self.spec.features_of(self.network, task, posterior, generator=generator)


def _method(method: str | Method, options: Mapping[str, Json]) -> RandomFeatures:
    known = {name: each for name, each in METHODS.items() if isinstance(each, RandomFeatures)}
    chosen = known.get(method) if isinstance(method, str) else method
    if not isinstance(chosen, RandomFeatures):  # others need more than gradients: inducing points, a last pass
        raise name_error("There is no method for your own loop called", method, known)
    for name in options:
        find_option(type(chosen), name, of="the method")
    return replace(chosen, **options)


def find_image_shape(network: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of images that a network takes: as its configuration says, or the smallest that work.

    Where several sizes work, it takes any: features are then averages over pixels, whose width is the same for all.

    >>> find_image_shape(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 30 * 30, 10)))
    (3, 32, 32)
    """
    like = next(network.parameters(), torch.empty(0))
    with evaluating(network), torch.no_grad(), torch.random.fork_rng(devices=[]):
        for shape in _candidates(network):
            try:
                network(torch.zeros(1, *shape, dtype=like.dtype, device=like.device))
            except Exception:  # noqa: S112 (whatever it is: not this size)
                continue
            return shape
    raise CalgpError(
        "No size of square images from 28 to 512 pixels goes through the network; say which images it takes, such as "
        "image_shape=(3, 224, 224)."
    )


def _candidates(network: nn.Module) -> Iterator[tuple[int, int, int]]:
    for known in (getattr(network, name, None) for name in ("pretrained_cfg", "default_cfg")):  # timm
        if isinstance(known, dict) and known.get("input_size"):
            yield tuple(known["input_size"])
    config: Any = getattr(network, "config", None)  # transformers
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        yield getattr(config, "num_channels", 3), size, size
    first = next((each for each in network.modules() if isinstance(each, nn.Conv2d)), None)
    for channels in (1, 3) if first is None else (first.in_channels,):
        yield from ((channels, side, side) for side in SIDES)
