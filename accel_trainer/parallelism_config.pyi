from accel_trainer.plugins.parallelism import *
