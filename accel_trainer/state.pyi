from accel_trainer.accelerator.shared_state import *
