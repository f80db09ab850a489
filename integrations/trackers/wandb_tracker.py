"""Weights & Biases, and trackio, a local database or a Space of the Hugging Face Hub with the same interface."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from accel_trainer.tracking import GeneralTracker


class _RunTracker(GeneralTracker):
    """Logs to a run of the library named `name`."""

    run: Any = None

    def __init__(self, run_name: str = "", logging_dir: str | Path | None = None, **kwargs: Any) -> None:
        """Keep the project's name and the options of its run, under accelerate's names for what is made by hand."""
        super().__init__(run_name, logging_dir, **kwargs)
        self.run_name = run_name

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @property
    def _library(self) -> Any:
        return importlib.import_module(self.name)

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
        """Open the run; its files go below the logging directory, where there is one."""
        options: dict[str, Any] = {"project": self.project_name}
        if self.logging_dir is not None:
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
