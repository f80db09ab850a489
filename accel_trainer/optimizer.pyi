from accel_trainer.accelerator.accelerated_optimizer import *
