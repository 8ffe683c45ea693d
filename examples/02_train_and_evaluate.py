# %% [markdown]
# # Train, evaluate, report
# The same three steps as `calgp train`, `calgp evaluate` and `calgp report`, from Python. Half a minute on two cores.

# %%
import tempfile
from pathlib import Path

import calgp

out = Path(tempfile.mkdtemp()) / "run"
classifier = calgp.train("digits", out=out, epochs=3, learning_rate=3e-3, schedule="one-cycle")

# %% [markdown]
# Inside: how often is it wrong, and are its probabilities right? Outside: is it more uncertain about letters?

# %%
inside = classifier.evaluate()
outside = classifier.evaluate("letters")
print(inside.scores)
print(f"mean entropy: digits {inside.mean_entropy:.2f}, letters {outside.mean_entropy:.2f} nats, {inside.passes}")
print(f"AUROC of entropy, letters against digits: {outside.ood['entropy'].auroc.value:.3f}")
assert outside.mean_entropy > inside.mean_entropy

# %%
print("report:", classifier.report())
