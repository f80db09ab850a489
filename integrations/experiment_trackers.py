"""TensorBoard, Weights & Biases, trackio and MLflow as trackers; their libraries are imported at first use."""

from __future__ import annotations

import importlib
import math
import os
import re
from itertools import islice
from pathlib import Path
from typing import Any

from accel_trainer import logging
from accel_trainer.errors import ConfigError
from accel_trainer.tracking import GeneralTracker

logger = logging.get_logger(__name__)

# Most parameters of one request to MLflow, and the longest one: https://mlflow.org/docs/latest/rest-api.html
_BATCH = 100
_MAX_CHARACTERS = 6000


class _LibraryTracker(GeneralTracker):
    """Logs to a run of the library named `name`."""

    run: Any = None

    @property
    def tracker(self) -> Any:
        """The library's object: TensorBoard's SummaryWriter, else the run."""
        return self.run

    @property
    def _library(self) -> Any:
        return importlib.import_module(self.name)


class _NamedTracker(_LibraryTracker):
    """A tracker that a script makes by hand with accelerate's `run_name`: the project's name."""

    def __init__(self, run_name: str = "", logging_dir: str | Path | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, logging_dir, **kwargs)
        self.run_name = run_name


class TensorBoardTracker(_NamedTracker):
    """Writes to `logging_dir/project_name`; `init_kwargs={"tensorboard": ...}` goes to torch's SummaryWriter."""

    name = "tensorboard"
    requires_logging_directory = True

    @property
    def writer(self) -> Any:
        """The SummaryWriter, under accelerate's name."""
        return self.run

    def start(self) -> None:
        """Open the event file; a ConfigError without a directory for it."""
        from torch.utils.tensorboard import SummaryWriter

        if self.logging_dir is None:
            raise ConfigError(
                "tracker 'tensorboard' has no logging_dir for its file; make it with TensorBoardTracker(run_name, "
                "logging_dir), or give log_with='tensorboard' and Accelerator(project_dir=...)"
            )
        self.run = SummaryWriter(os.path.join(self.logging_dir, self.project_name), **self.kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Show the hyperparameters; other values than numbers, texts and booleans as text."""
        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in values.items()
        }
        # The directory of the values; without a name there would be a second one beside it.
        self.run.add_hparams(plain, {}, run_name=".")
        self.run.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers, texts, and dicts as scalars in one chart; a ConfigError for others, after the rest."""
        unknown: dict[str, str] = {}
        for key, value in values.items():
            if isinstance(value, str):
                self.run.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                numbers = {name: number for name, number in value.items() if _is_number(number)}
                self.run.add_scalars(key, numbers, global_step=step, **kwargs)
                unknown |= {f"{key}/{name}": type(value[name]).__name__ for name in value if name not in numbers}
            elif isinstance(value, bool | int | float):
                self.run.add_scalar(key, value, global_step=step, **kwargs)
            else:
                unknown[key] = type(value).__name__
        self.run.flush()
        if unknown:
            raise ConfigError(f"TensorBoard shows numbers, texts and dicts of numbers, and got {unknown}; convert them")

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images, by default (number, height, width, channels); another order as `dataformats`."""
        for key, images in values.items():
            self.run.add_images(key, images, global_step=step, **{"dataformats": "NHWC", **kwargs})
        self.run.flush()

    def finish(self) -> None:
        """Close the event file."""
        self.run.close()


def _is_number(value: Any) -> bool:
    """Whether TensorBoard takes a value of a dict: a number, NumPy's too, or a tensor of one element."""
    if hasattr(value, "item"):
        return math.prod(value.shape) == 1 and not isinstance(value, str)
    return isinstance(value, bool | int | float)


class _RunTracker(_NamedTracker):
    """Logs to a run that takes tables and other values itself."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values of any kind that the library knows."""
        self.run.log(values, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table; `kwargs` goes to the library's `Table`."""
        table = self._library.Table(columns=columns, data=data, dataframe=dataframe, **kwargs)
        self.run.log({table_name: table}, step=step)

    def finish(self) -> None:
        """Close the run, once its values are written or sent."""
        self.run.finish()


class WandBTracker(_RunTracker):
    """Logs to a run of the project; `init_kwargs={"wandb": ...}` goes to `wandb.init` (entity, name, mode, ...)."""

    name = "wandb"

    def start(self) -> None:
        """Open the run; its files go below the logging directory, where there is one. A ConfigError for an address."""
        options: dict[str, Any] = {"project": self.project_name}
        if self.logging_dir is not None and "dir" not in self.kwargs:
            if isinstance(self.logging_dir, str):
                raise ConfigError(
                    f"tracker 'wandb' keeps its files in a folder, and logging_dir={self.logging_dir!r} is an address; "
                    'give a folder, or init_kwargs={"wandb": {"dir": ...}}'
                )
            self.logging_dir.mkdir(parents=True, exist_ok=True)
            options["dir"] = str(self.logging_dir)
        self.run = self._library.init(**{**options, **self.kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters as the run's config."""
        self.run.config.update(values, allow_val_change=True)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `kwargs` goes to `wandb.Image`."""
        make = self._library.Image
        self.run.log({key: [make(image, **kwargs) for image in images] for key, images in values.items()}, step=step)


class TrackioTracker(_RunTracker):
    """Logs to a run of the project; `init_kwargs={"trackio": ...}` goes to `trackio.init` (name, space_id, ...)."""

    name = "trackio"

    def start(self) -> None:
        """Open the run, without showing a dashboard."""
        self.run = self._library.init(**{"project": self.project_name, "embed": False, **self.kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters as the run's config; trackio sends it with the first values."""
        self.run.config.update(values)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `kwargs` goes to `trackio.Image`."""
        named = {f"{key}_{i}": image for key, images in values.items() for i, image in enumerate(images)}
        self.run.log({key: self._library.Image(image, **kwargs) for key, image in named.items()}, step=step)


class MLflowTracker(_LibraryTracker):
    """Logs to a run of the experiment called `project_name`.

    `init_kwargs={"mlflow": ...}` goes to `mlflow.start_run` (run_name, run_id, tags, nested, description, ...), besides
    `tracking_uri`, which goes to `mlflow.set_tracking_uri`. The run is the active one: `mlflow.log_artifact` works.
    """

    name = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | Path | None = None,
        *,
        nested_run: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the experiment's name and its run's options; `nested_run` is accelerate's name of `nested`."""
        nested = {} if nested_run is None else {"nested": nested_run}
        super().__init__(experiment_name or "", logging_dir, **nested, **kwargs)

    def start(self) -> None:
        """Make the experiment where it does not exist, and open a run."""
        mlflow, options = self._library, dict(self.kwargs)
        if (uri := options.pop("tracking_uri", None)) is not None:
            mlflow.set_tracking_uri(uri)
        # Not mlflow.set_experiment(): that writes to the environment, and binds every later run of the process.
        experiment = mlflow.get_experiment_by_name(self.project_name)
        number = experiment.experiment_id if experiment is not None else mlflow.create_experiment(self.project_name)
        self.run = mlflow.start_run(**{"experiment_id": number, **options})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters as the run's parameters, as texts of at most 6000 characters."""
        texts = {_name(key): str(value) for key, value in _flat(values).items()}
        for key in [key for key, text in texts.items() if len(text) > _MAX_CHARACTERS]:
            logger.warning(
                "MLflow takes parameters of up to %d characters; %r is longer, left out", _MAX_CHARACTERS, key
            )
            del texts[key]
        pairs = iter(texts.items())
        while batch := dict(islice(pairs, _BATCH)):
            self._library.log_params(batch)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store numbers as metrics; of other values a ConfigError, after the numbers are stored."""
        metrics = {_name(key): float(value) for key, value in values.items() if isinstance(value, bool | int | float)}
        self._library.log_metrics(metrics, step=step, **kwargs)
        others = {key: type(value).__name__ for key, value in values.items() if _name(key) not in metrics}
        if others:
            raise ConfigError(f"MLflow stores numbers, and got {others}; convert them, or log them as artifacts")

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store images as artifacts of the step; `kwargs` goes to `mlflow.log_image`."""
        for key, images in values.items():
            for number, image in enumerate(images):
                self._library.log_image(image, key=f"{_name(key)}_{number}", step=step or 0, **kwargs)

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
        if dataframe is None:
            dataframe = {name: [row[i] for row in data or []] for i, name in enumerate(columns or [])}
        self._library.log_table(dataframe, artifact_file=f"{table_name}.json", **kwargs)

    def finish(self) -> None:
        """Close the run."""
        self._library.end_run()


def _name(key: str) -> str:
    """MLflow's names hold letters, digits and `_-. :/`."""
    return re.sub(r"[^\w\-. :/]", "_", str(key))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
