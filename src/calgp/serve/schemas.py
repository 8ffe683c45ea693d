"""What goes over the wire: every body that the API takes or gives, as the OpenAPI document describes it."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag

SAMPLES = 50  # unless asked for otherwise, as in `calgp predict`
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
    """A model without other fields than its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Encoded(Closed):
    """An image file, PNG, JPEG or WebP, in base64."""

    base64: Annotated[str, Field(min_length=4, description="The bytes of the file, in base64.", examples=[PIXEL])]


class Grey(Closed):
    """A grey image: lines of pixels, 0 (black) to 255 (white). All lines have the same length."""

    grey: Annotated[list[GreyLine], Field(min_length=1, examples=[[[0, 128], [255, 0]]]), FailFast()]


class Rgb(Closed):
    """A colour image: lines of pixels of red, green and blue, 0 to 255. All lines have the same length."""

    rgb: Annotated[list[ColourLine], Field(min_length=1, examples=[[[[255, 0, 0], [0, 0, 255]]]]), FailFast()]


def _kind(image: Any) -> str:
    """Which form an image has, by its key: only this form is tried, so that long lists are read once."""
    names = image if isinstance(image, dict) else ()
    return next((name for name in ("grey", "rgb") if name in names), "base64")


Form = Annotated[
    Annotated[Encoded, Tag("base64")] | Annotated[Grey, Tag("grey")] | Annotated[Rgb, Tag("rgb")], Discriminator(_kind)
]


class ImagesRequest(Closed):
    """Images of any size: they are stretched and recoloured to what the model takes, as `calgp predict` does it."""

    images: Annotated[list[Form], Field(min_length=1), FailFast()]


class PredictQuery(BaseModel):
    """The query string of a prediction; `limits.samples` is checked in `service`."""

    samples: int = Field(SAMPLES, ge=1, description="S: draws of the masks to average over.")
    seed: int = Field(0, ge=0, lt=2**63, description="Of the masks: the same seed gives the same answer.")
    error: float | None = Field(
        None, gt=0, lt=1, description="Stop as soon as the label is decided but for this probability."
    )


class StreamQuery(PredictQuery):
    every: int | None = Field(
        None, ge=1, description="Samples between two lines; samples / 25 unless given. A client that takes lines more "
        "slowly than they are made gets fewer.",
    )  # fmt: skip
    draws: bool = Field(False, description="Also the probabilities of each single sample.")


class Prediction(Closed):
    """What the model says about one image. Lists have one entry a class, in the order of `classes`."""

    label: str = Field(description="The most probable class.", examples=["7"])
    index: int = Field(ge=0, description="Its place in `classes`.", examples=[7])
    confidence: Probability = Field(description="Its probability.", examples=[0.93])
    probabilities: list[Probability] = Field(
        description="p(y | x), averaged over all that is random; calibrated if the run is."
    )
    spread: list[Nats] = Field(description="Standard deviation of the probabilities over samples, or draws of f.")
    monte_carlo_error: list[Nats] = Field(
        description="Standard error of the probabilities: they are an average over finitely many samples."
    )
    entropy: Nats = Field(description="-Σ p log p in nats: the total uncertainty.")
    aleatoric: Nats = Field(description="Mean entropy of the samples: the uncertainty that more training data leaves.")
    epistemic: Nats = Field(
        description="Mutual information: the uncertainty that more training data could remove. Both parts are those "
        "before calibration, where they add up to the entropy."
    )
    samples: int = Field(ge=1, description="Samples that were drawn.")
    passes: str = Field(description="How it was computed.", examples=["1 pass", "50 samples"])
    label_is_decided: bool | None = Field(
        description="Whether sampling stopped because further samples would not change the label; null if `error` was "
        "not given or one pass is all."
    )
    conformal_set: list[str] | None = Field(
        description="Classes that contain the true one as often as the run promises; null if it promises nothing."
    )
    abstain: bool | None = Field(description="Whether the run abstains; null if it has no rule for that.")
    outlier_score: float | None = Field(
        None, description="How far the image is from the training images; null if the run has no outlier score."
    )
    outlier: bool | None = Field(
        None, description="Whether that is beyond the threshold, which the stated share of ordinary images exceeds."
    )


class PredictionResponse(Closed):
    """The predictions, in the order of the images."""

    classes: list[str]
    seed: int = Field(ge=0)
    predictions: list[Prediction]


class StreamLine(Closed):
    """A line of the stream: what is known after so many samples. The last line has `done`: true."""

    done: bool
    samples: int = Field(ge=1, description="Samples drawn so far.")
    total: int = Field(ge=1, description="Samples asked for: at `done` fewer may have been enough.")
    classes: list[str]
    seed: int = Field(ge=0)
    predictions: list[Prediction]
    draws: list[list[list[Probability]]] | None = Field(
        description="With draws=true: for each image the probabilities of each sample since the last line."
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


def validation_sentence(errors: Sequence[Any]) -> str:
    """What pydantic found, without what was sent."""
    found = [f"{'.'.join(map(str, error['loc'])) or 'body'}: {error['msg']}" for error in errors[:3]]
    return "; ".join(found)[:500]
