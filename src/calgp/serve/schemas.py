"""What goes over the wire: every body that the API takes or gives, as the OpenAPI document says it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

Shade = Annotated[int, Field(ge=0, le=255)]
Colours = Annotated[list[Shade], Field(min_length=3, max_length=3), FailFast()]
GreyLine = Annotated[list[Shade], Field(min_length=1), FailFast()]
ColourLine = Annotated[list[Colours], Field(min_length=1), FailFast()]
Probability = Annotated[float, Field(ge=0, le=1 + 1e-6)]
Nats = Annotated[float, Field(ge=0)]

PIXEL = (  # a red dot
    "iVBORw0KGgoAAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4//8/w38GIAXDIBKE0DHxgljNBAAO9TXL0Y4OHwAAAABJRU5ErkJggg=="
)


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Encoded(Closed):
    """A picture file, PNG, JPEG or WebP, in base64."""

    base64: Annotated[str, Field(min_length=4, description="The bytes of the file, in base64.", examples=[PIXEL])]


class Grey(Closed):
    """A grey picture: lines of pixels, 0 (black) to 255 (white). All lines have the same length."""

    grey: Annotated[list[GreyLine], Field(min_length=1, examples=[[[0, 128], [255, 0]]]), FailFast()]


class Rgb(Closed):
    """A colour picture: lines of pixels of red, green and blue, 0 to 255. All lines have the same length."""

    rgb: Annotated[list[ColourLine], Field(min_length=1, examples=[[[[255, 0, 0], [0, 0, 255]]]]), FailFast()]


class Pictures(Closed):
    """Pictures of any size: they are stretched and recoloured to what the model takes, as `calgp predict` does it."""

    images: Annotated[list[Encoded | Grey | Rgb], Field(min_length=1), FailFast()]


class Prediction(Closed):
    """What the model says of one picture. Lists have one entry a class, in the order of `classes`."""

    label: str = Field(description="The most probable class.", examples=["7"])
    index: int = Field(ge=0, description="Its place in `classes`.", examples=[7])
    confidence: Probability = Field(description="Its probability.", examples=[0.93])
    probabilities: list[Probability] = Field(description="p(y | x), averaged over samples, calibrated if the run is.")
    spread: list[Nats] = Field(description="Standard deviation of the probabilities over samples.")
    monte_carlo_error: list[Nats] = Field(
        description="Standard error of the probabilities, for having averaged only so many samples."
    )
    entropy: Nats = Field(description="-Σ p log p in nats: the doubt in all.")
    aleatoric: Nats = Field(description="Mean entropy of the samples: the doubt that more training data would leave.")
    epistemic: Nats = Field(
        description="Mutual information: the doubt that more training data could take away. Both parts are those "
        "before calibration, where they add up to the entropy."
    )
    samples: int = Field(ge=1, description="Samples that were drawn.")
    settled: bool | None = Field(
        description="Whether sampling stopped because the label was settled; null if `error` was not given."
    )
    conformal_set: list[str] | None = Field(
        description="Classes of which one is the true one as often as the run promises; null if it promises nothing."
    )
    abstain: bool | None = Field(description="Whether the run would rather not answer; null if it was not told when.")


class Answered(Closed):
    """The predictions, in the order of the pictures."""

    classes: list[str]
    seed: int = Field(ge=0)
    predictions: list[Prediction]


class Step(Closed):
    """A line of the stream: what is known after so many samples. The last line has `done`: true."""

    done: bool
    samples: int = Field(ge=1, description="Samples drawn so far.")
    total: int = Field(ge=1, description="Samples asked for: at `done` fewer may have been enough.")
    classes: list[str]
    seed: int = Field(ge=0)
    predictions: list[Prediction]
    draws: list[list[list[Probability]]] | None = Field(
        description="With draws=true: for each picture the probabilities by each sample since the last line."
    )


class Problem(BaseModel):
    """What went wrong (RFC 9457)."""

    model_config = ConfigDict(frozen=True)

    type: Literal["about:blank"] = "about:blank"
    title: str = Field(examples=["Content Too Large"])
    status: int = Field(ge=400, le=599, examples=[413])
    detail: str = Field(description="One sentence: what was expected, what came, what to do.")


class Health(Closed):
    status: Literal["ok"]


class Form(Closed):
    """What pictures are brought to before the model sees them."""

    channels: int
    height: int
    width: int


class ReliabilityTable(Closed):
    """When the model said so much, how often was it right? One entry a bin of confidence; null where it is empty."""

    edges: list[float] = Field(description="One more than bins.")
    count: list[int]
    accuracy: list[float | None]
    confidence: list[float | None]


class Evaluation(Closed):
    """How the run did on the test images of a source, as `calgp evaluate` kept it."""

    source: str
    outside: bool = Field(
        description="Whether the images have other classes than the run: then only doubt is measured."
    )
    n: int
    samples: int
    scores: dict[str, float] | None
    intervals: dict[str, list[float]] | None = Field(description="95 % bootstrap intervals.")
    reliability: ReliabilityTable | None
    entropy_histogram: dict[str, list[float]] | None
    mean_entropy: float | None
    entropy_percentiles: list[float] | None = Field(
        description="Entropies that 0, 1, …, 100 of 100 images do not exceed; null if predictions were not kept."
    )
    ood: dict[str, Any] | None = Field(description="Outside: how well doubt tells these images from the run's own.")


class LimitsTold(Closed):
    body: int
    side: int
    pixels: int
    images: int
    samples: int
    seconds: float


class ModelTold(Closed):
    """The run that is served."""

    name: str
    label: str = Field(description="The method with its options.")
    network: str
    source: str = Field(description="What it was trained on.")
    train_images: int
    classes: list[str]
    input: Form
    random: bool = Field(description="Whether samples differ; if not, one is drawn whatever is asked for.")
    calibrator: str | None
    decisions: dict[str, Any] | None = Field(description="decisions.json: thresholds, sets and what they promise.")
    evaluations: list[Evaluation] = Field(description="With the probabilities that are served, calibrated or not.")
    default_samples: int
    limits: LimitsTold
    version: str = Field(description="Of calgp.")


class Shown(Closed):
    """A test image with what the model said of it."""

    picture: str = Field(description="A data: address of a small PNG.")
    name: str
    truth: str
    label: str
    confidence: Probability
    entropy: Nats
    epistemic: Nats
    wrong: bool


class GalleryTold(Closed):
    """Test images of the run: empty where they are not on this machine or were not evaluated."""

    most_certain: list[Shown]
    least_certain: list[Shown]
    confidently_wrong: list[Shown]
