from accel_trainer.accelerator.accelerated_scheduler import *
