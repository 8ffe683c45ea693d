"""Metrics as people read them: names, formats, and what they say."""

from .words import decimal, nats, percent

METRICS = {  # name in scores-*.json: name in the paper, how to write it, what it says
    "err": ("ERR", percent, "Share of wrong predictions."),
    "mnll": ("MNLL", decimal, "Mean negative log-likelihood in nats: small if true labels are given high probability."),
    "ece": ("ECE", decimal, "Expected calibration error: how far confidence is from accuracy, averaged over 20 bins."),
    "brier": ("BRIER", decimal, "Squared distance between probabilities and labels, summed over classes (0 to 2)."),
    "mce": ("MCE", decimal,
            "Maximum calibration error: the same distance in the worst bin, however few images it has."),
    "entropy": ("Entropy", nats,
                "Mean uncertainty of the predictions, in nats. Neither high nor low is better by itself."),
}  # fmt: skip
MOST_CLASSES = 30  # of a confusion matrix that is shown
PAPER = ("err", "mnll", "ece", "brier")
VARIANTS = {
    "paper": "The paper's text: midpoint of the bin for its confidence, 20 bins",
    "authors": "The authors' code: mean confidence, 20 bins, a confidence of exactly 1 is lost",
    "guo": "Guo et al. (2017): mean confidence, 15 bins",
    "torchmetrics": "torchmetrics: mean confidence, 15 bins, exactly 1 in a bin of its own",
    "netcal": "netcal: mean confidence, 10 bins",
    "equal mass": "Equal mass: 20 bins that hold the same number of images",
    "classwise": "Classwise: the calibration error of every class's probability, averaged over classes",
}
DETECTION = {
    "auroc": ("AUROC", nats),
    "aupr_out": ("AUPR, outside", nats),
    "aupr_in": ("AUPR, inside", nats),
    "fpr95": ("FPR95", percent),
}
SCORED_BY = {  # outlier scores, in the order of a table
    "entropy": "entropy",
    "mutual_information": "mutual information",
    "confidence": "1 − confidence",
    "combined": "entropy and features",
    "density": "density of the features",
    "direction": "direction of the features",
    "neighbours": "nearest neighbours",
    "variance": "variance",
    "network_confidence": "the network’s own 1 − confidence",
}
RANKED_BY = {"confidence": "confidence", "entropy": "entropy", "mutual-information": "mutual information"}
SETS = {  # kinds of prediction sets
    "lac": "LAC: the classes whose probability is high enough",
    "aps": "APS: the most probable classes up to a sum, the last one by a draw that each image keeps",
    "aps-plain": "APS without a draw: the most probable classes up to a sum",
}
