"""MLflow: the tracking server or store that MLflow is set to, or the one given as `tracking_uri`."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any

from accel_trainer import logging
from accel_trainer.errors import ConfigError
from accel_trainer.tracking import GeneralTracker

logger = logging.get_logger(__name__)

# Most parameters of one request, and the longest one: https://mlflow.org/docs/latest/rest-api.html
_BATCH = 100
_MAX_CHARACTERS = 6000


class MLflowTracker(GeneralTracker):
    """Logs to a run of the experiment called `project_name`.

    `init_kwargs={"mlflow": ...}` goes to `mlflow.start_run` (run_name, run_id, tags, nested, description, ...), besides
    `tracking_uri`, which goes to `mlflow.set_tracking_uri`. The run is the active one: `mlflow.log_artifact` works.
    """

    name = "mlflow"
    run: Any = None

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | Path | None = None,
        *,
        nested_run: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the experiment's name and the options of its run.

        Args:
            nested_run: `nested` of `mlflow.start_run`, under accelerate's name.
        """
        nested = {} if nested_run is None else {"nested": nested_run}
        super().__init__(experiment_name or "", logging_dir, **nested, **kwargs)

    @property
    def tracker(self) -> Any:
        """The active MLflow run."""
        return self.run

    def start(self) -> None:
        """Make the experiment where it does not exist, and open a run."""
        import mlflow

        options = dict(self.kwargs)
        if (uri := options.pop("tracking_uri", None)) is not None:
            mlflow.set_tracking_uri(uri)
        # Not mlflow.set_experiment(): that writes to the environment, and binds every later run of the process.
        experiment = mlflow.get_experiment_by_name(self.project_name)
        number = experiment.experiment_id if experiment is not None else mlflow.create_experiment(self.project_name)
        self.run = mlflow.start_run(**{"experiment_id": number, **options})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters as the run's parameters, as texts of at most 6000 characters."""
        import mlflow

        texts = {_name(key): str(value) for key, value in _flat(values).items()}
        for key in [key for key, text in texts.items() if len(text) > _MAX_CHARACTERS]:
            logger.warning(
                "MLflow takes parameters of up to %d characters; %r is longer, left out", _MAX_CHARACTERS, key
            )
            del texts[key]
        pairs = iter(texts.items())
        while batch := dict(islice(pairs, _BATCH)):
            mlflow.log_params(batch)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store numbers as metrics.

        Raises:
            ConfigError: a value is no number; the numbers are stored.
        """
        import mlflow

        metrics = {_name(key): float(value) for key, value in values.items() if isinstance(value, bool | int | float)}
        mlflow.log_metrics(metrics, step=step, **kwargs)
        others = {key: type(value).__name__ for key, value in values.items() if _name(key) not in metrics}
        if others:
            raise ConfigError(f"MLflow stores numbers, and got {others}; convert them, or log them as artifacts")

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store images as artifacts of the step; `kwargs` goes to `mlflow.log_image`."""
        import mlflow

        for key, images in values.items():
            for number, image in enumerate(images):
                mlflow.log_image(image, key=f"{_name(key)}_{number}", step=step or 0, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Store a table as the artifact `table_name.json`."""
        import mlflow

        if dataframe is None:
            dataframe = {name: [row[i] for row in data or []] for i, name in enumerate(columns or [])}
        mlflow.log_table(dataframe, artifact_file=f"{table_name}.json", **kwargs)

    def finish(self) -> None:
        """Close the run."""
        import mlflow

        mlflow.end_run()


def _name(key: str) -> str:
    """MLflow's names hold letters, digits and `_-. :/`."""
    return re.sub(r"[^\w\-. :/]", "_", str(key))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
