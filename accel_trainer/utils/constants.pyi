from accel_trainer.utils import *
