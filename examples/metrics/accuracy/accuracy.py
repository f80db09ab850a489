"""Accuracy as an `evaluate` metric that is loaded from this folder, so that the examples need no download."""

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """Share of the predictions that equal their reference."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="The share of predictions that equal their reference.",
            citation="",
            inputs_description="predictions and references: integers, one of each for every sample.",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
