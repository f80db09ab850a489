"""trackio: a local database, or a Space of the Hugging Face Hub."""

from __future__ import annotations

from typing import Any

from accel_trainer.tracking import GeneralTracker

__all__ = ["TrackioTracker"]


class TrackioTracker(GeneralTracker):
    """Logs to a run of the project; `init_kwargs={"trackio": ...}` goes to `trackio.init` (name, space_id, ...)."""

    name = "trackio"
    run: Any = None

    @property
    def tracker(self) -> Any:
        """The trackio run."""
        return self.run

    def start(self) -> None:
        """Open the run, without showing a dashboard."""
        import trackio

        self.run = trackio.init(**{"project": self.project_name, "embed": False, **self.kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters as the run's config; trackio sends it with the first values."""
        self.run.config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log whatever trackio takes."""
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `kwargs` goes to `trackio.Image`."""
        import trackio

        named = {f"{key}_{i}": image for key, images in values.items() for i, image in enumerate(images)}
        self.run.log({key: trackio.Image(image, **kwargs) for key, image in named.items()}, step=step)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table; `kwargs` goes to `trackio.Table`."""
        import trackio

        self.run.log({table_name: trackio.Table(columns=columns, data=data, dataframe=dataframe, **kwargs)}, step=step)

    def finish(self) -> None:
        """Close the run; what is not written yet is written now."""
        self.run.finish()
