"""What is fitted on predictions of held-out images: calibrators, thresholds, prediction sets.

Pure values: a map is fitted, applied and written as data. Nothing here reads files, trains or knows a network.
"""
