"""Image classifiers that know when they don't know: calibrated deep convolutional Gaussian processes."""

__version__ = "0.1.0"
