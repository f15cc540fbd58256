"""Baselines: the majority, or the mean, and a bag of words (scikit-learn)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from parts import scores
from parts.table import Row
from parts.tasks import Classification, Regression, Task


def baselines(task: Task, training: Sequence[Row], testing: Sequence[Row]) -> dict[str, scores.Metrics]:
    """Metrics of the baselines by name; none for tasks without a single class or number as answer."""
    texts, others = ([" ".join(filter(None, task.texts(row))) for row in rows] for rows in (training, testing))
    wanted = [row[task.columns.label] for row in training]
    if isinstance(task, Classification):
        most = Counter(map(str, wanted)).most_common(1)[0][0]
        constant: list = [most] * len(testing)
    elif isinstance(task, Regression):
        constant = [task.mean] * len(testing)
    else:
        return {}
    found = {"majority" if isinstance(task, Classification) else "mean": task.measure(constant, testing)}

    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline

    kind = LogisticRegression(C=10, max_iter=1000) if isinstance(task, Classification) else Ridge()
    model = make_pipeline(TfidfVectorizer(token_pattern=r"\w+|[^\w\s]", sublinear_tf=True), kind)
    labels = [str(x) for x in wanted] if isinstance(task, Classification) else [float(x) for x in wanted]
    found["bag of words"] = task.measure(model.fit(texts, labels).predict(others).tolist(), testing)
    return found
