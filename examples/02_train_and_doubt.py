# %% [markdown]
# # Train, evaluate, doubt
# The same three steps as `calgp train`, `calgp evaluate` and `calgp report`, from Python. Half a minute on two cores.

# %%
import tempfile
from pathlib import Path

from calgp import BACKBONES, METHODS, Run, RunFolder, evaluate, train, write_report

folder = RunFolder(Path(tempfile.mkdtemp()) / "run")
run = Run(
    METHODS["cnn-gp-sorf"], BACKBONES["lenet"], source="digits", epochs=5, learning_rate=3e-3, schedule="one-cycle"
)
train(run, folder)

# %% [markdown]
# Inside: how often is it wrong, and are its probabilities right? Outside: does it doubt letters more than digits?

# %%
inside = evaluate(folder, samples=20).summary
outside = evaluate(folder, source="letters", samples=20).summary
print({name: round(value, 4) for name, value in inside["scores"].items()})
print(f"mean entropy: digits {inside['mean_entropy']:.2f}, letters {outside['mean_entropy']:.2f} nats")
print(f"AUROC of entropy, letters against digits: {outside['ood']['entropy']['auroc']['value']:.3f}")
assert outside["mean_entropy"] > inside["mean_entropy"]

# %%
print("report:", write_report([folder], folder.path / "report.html"))
