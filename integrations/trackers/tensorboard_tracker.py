"""TensorBoard: event files below the logging directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel_trainer.errors import ConfigError
from accel_trainer.tracking import GeneralTracker


class TensorBoardTracker(GeneralTracker):
    """Writes to `logging_dir/project_name`; `init_kwargs={"tensorboard": ...}` goes to torch's SummaryWriter."""

    name = "tensorboard"
    requires_logging_directory = True
    writer: Any = None

    def __init__(self, run_name: str = "", logging_dir: str | Path | None = None, **kwargs: Any) -> None:
        """Keep the name and options of the run, under accelerate's names for a tracker that a script makes by hand."""
        super().__init__(run_name, logging_dir, **kwargs)
        self.run_name = run_name

    @property
    def tracker(self) -> Any:
        """The SummaryWriter."""
        return self.writer

    def start(self) -> None:
        """Open the event file.

        Raises:
            ConfigError: there is no directory for it.
        """
        from torch.utils.tensorboard import SummaryWriter

        if self.logging_dir is None:
            raise ConfigError(
                "tracker 'tensorboard' has no logging_dir for its file; make it with TensorBoardTracker(run_name, "
                "logging_dir), or give log_with='tensorboard' and Accelerator(project_dir=...)"
            )
        self.writer = SummaryWriter(str(self.logging_dir / self.project_name), **self.kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Show the hyperparameters; other values than numbers, texts and booleans as text."""
        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in values.items()
        }
        # The directory of the values; without a name there would be a second one beside it.
        self.writer.add_hparams(plain, {}, run_name=".")
        self.writer.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers as scalars, texts as text, and dicts as several scalars in one chart.

        Raises:
            ConfigError: a value is none of those; the others are written.
        """
        unknown = {}
        for key, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(key, value, global_step=step, **kwargs)
            elif isinstance(value, bool | int | float):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            else:
                unknown[key] = type(value).__name__
        self.writer.flush()
        if unknown:
            raise ConfigError(f"TensorBoard shows numbers, texts and dicts of numbers, and got {unknown}; convert them")

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images, by default (number, height, width, channels); another order as `dataformats`."""
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **{"dataformats": "NHWC", **kwargs})
        self.writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()
