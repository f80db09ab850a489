from accel_trainer.accelerator.local_sgd import *
