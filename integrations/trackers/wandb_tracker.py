"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from accel_trainer.tracking import GeneralTracker

__all__ = ["WandBTracker"]


class WandBTracker(GeneralTracker):
    """Logs to a run of the project; `init_kwargs={"wandb": ...}` goes to `wandb.init` (entity, name, mode, ...)."""

    name = "wandb"
    run: Any = None

    @property
    def tracker(self) -> Any:
        """The wandb run."""
        return self.run

    def start(self) -> None:
        """Open the run; its files go below the logging directory, where there is one."""
        import wandb

        options: dict[str, Any] = {"project": self.project_name}
        if self.logging_dir is not None:
            self.logging_dir.mkdir(parents=True, exist_ok=True)
            options["dir"] = str(self.logging_dir)
        self.run = wandb.init(**{**options, **self.kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters as the run's config."""
        self.run.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log whatever wandb takes."""
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `kwargs` goes to `wandb.Image`."""
        import wandb

        self.run.log(
            {key: [wandb.Image(image, **kwargs) for image in images] for key, images in values.items()}, step=step
        )

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table; `kwargs` goes to `wandb.Table`."""
        import wandb

        self.run.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe, **kwargs)}, step=step)

    def finish(self) -> None:
        """Close the run; what is not sent yet is sent now."""
        self.run.finish()
