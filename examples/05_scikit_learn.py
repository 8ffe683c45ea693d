# %% [markdown]
# # With scikit-learn
# `ConvGPClassifier` is any of calgp's methods as a scikit-learn classifier. Pictures of 8 × 8 pixels that come with
# scikit-learn, as flat vectors with words for labels. Half a minute on two cores.

# %%
import joblib
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split

from calgp import ConvGPClassifier

digits = load_digits(n_class=3)  # floats, 0 … 16
names = np.array(["zero", "one", "two"])[digits.target]
X, X_test, y, y_test = train_test_split(digits.data, names, test_size=0.25, stratify=names, random_state=0)

classifier = ConvGPClassifier(
    "cnn-gp-sorf",
    image_shape=(8, 8),
    backbone="resnet",
    backbone_options={"n": 1, "pad_to": 8},  # no padding to 32 × 32
    normalise="standard",
    epochs=20,
    batch_size=32,
    learning_rate=1e-2,
    passes=20,
    random_state=0,
    device="cpu",
)
classifier.fit(X, y)
print(f"accuracy {classifier.score(X_test, y_test):.3f}")
assert classifier.score(X_test, y_test) > 0.9

# %% [markdown]
# Probabilities, and how much is in doubt: test digits, and noise, of which it has seen nothing.

# %%
noise = np.random.default_rng(0).uniform(0, 16, (100, 64))
inside, outside = classifier.entropy(X_test).mean(), classifier.entropy(noise).mean()
print(classifier.classes_, classifier.predict_proba(X_test[:2]).round(3))
print(f"mean entropy: digits {inside:.2f}, noise {outside:.2f} nats")
predictive = classifier.predictive(X_test)
print(f"of it from not knowing the functions: {predictive.mutual_information.mean():.2f}")

# %% [markdown]
# All of scikit-learn's tools take it: cross-validation, searches, pipelines, joblib.

# %%
quick = classifier.set_params(epochs=5)
print("folds:", cross_val_score(quick, X, y, cv=2, scoring="neg_log_loss").round(3))
search = GridSearchCV(quick, {"method": ["cnn", "cnn-gp-sorf"]}, cv=2, scoring="neg_log_loss").fit(X, y)
print("best:", search.best_params_)
joblib.dump(search.best_estimator_, "digits.joblib")
assert (joblib.load("digits.joblib").predict(X_test) == search.predict(X_test)).all()
